"""Errors that a caller can tell apart."""


class KVSpecError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(KVSpecError, ValueError):
    """Invalid flags; the message names the flag, its value and what is allowed."""


class UnsupportedError(KVSpecError):
    """A model, an SGLang version or an SGLang feature that KVSpec cannot serve yet."""


class HookError(KVSpecError):
    """Hook into SGLang that did not apply; the server must not start with only some hooks."""


class CodecError(KVSpecError, ValueError):
    """A page that a codec cannot represent (debug mode), or a malformed record."""


class PageStateError(KVSpecError):
    """Transition of a residual page that its state does not allow."""


class CapacityError(KVSpecError):
    """Missing free slot in a pool, although the plan promised one."""


class CorruptResidual(KVSpecError):
    """Page in the residual store that is not as it was written."""


class RanksDisagree(KVSpecError):
    """Ranks of one model that serve different requests."""


class TransportError(KVSpecError):
    """Transfer that is used wrongly, or a link that may not be opened or has failed."""


class HandshakeRefused(TransportError):
    """Receiver that a sender refused in the handshake; the message gives the reason."""


class PrefixStoreError(KVSpecError):
    """Prefix store that cannot be opened, or a prefix server that admits no more servers."""


class DrafterError(KVSpecError):
    """Drafter of another package that broke its protocol."""


class SchedulerError(KVSpecError):
    """Verify scheduler of another package that broke its protocol."""
