"""Errors a caller may want to tell apart."""


class KVSpecError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(KVSpecError, ValueError):
    """Flags that make no sense; the message names flag, value and what is allowed."""


class UnsupportedError(KVSpecError):
    """A model, an SGLang version or an SGLang feature that KVSpec cannot serve yet."""


class HookError(KVSpecError):
    """A patch of SGLang did not apply; the server must not start half patched."""


class CodecError(KVSpecError, ValueError):
    """A page that a codec cannot represent (debug mode), or a malformed record."""


class PageStateError(KVSpecError):
    """A residual page was asked to make a transition its state does not allow."""


class CapacityError(KVSpecError):
    """A pool had no free slot although the plan promised one."""


class CorruptResidual(KVSpecError):
    """A page is not in the residual store as it was written there."""


class RanksDisagree(KVSpecError):
    """Ranks that serve one model together have come to serve different requests."""


class TransportError(KVSpecError):
    """A transfer that was asked for what it cannot do, or a link that may not be opened."""


class HandshakeRefused(TransportError):
    """The two ends of a link differ in what they must agree on; the message says in what."""


class PrefixStoreError(KVSpecError):
    """A folder that cannot be opened as the prefix store that was asked for."""


class DrafterError(KVSpecError):
    """A drafter of another package did not do what its protocol says."""


class SchedulerError(KVSpecError):
    """A verify scheduler of another package did not do what its protocol says."""
