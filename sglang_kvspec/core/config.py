"""The one parsed, frozen configuration of a KVSpec server."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from sglang_kvspec.core.errors import ConfigError

Target = Literal["exact", "int8"]
CodecName = Literal["log4", "uniform4"]
Schedule = Literal["auto", "staggered", "rounds"]
Stream = Literal["paced", "burst"]
Transfer = Literal["split", "full", "int8", "int4", "cachegen"]

MAX_DRAFT_LEN = 64
MOST_RECENT_PAGES = 64
AUTO_DRAFT_LEN = "auto"
# With the token before them as many as kernels that verify take at once: one more would be a pass
# of its own over everything that the request has in memory.
MOST_AUTO_DRAFTS = 31
# Where residuals lie in host memory, each fetch of them is to serve more: two such passes.
MOST_AUTO_DRAFTS_HOSTED = 63
DEFAULT_PAGE_SIZE = 64
# Far beyond any machine, whose own memory is checked where the server starts.
MAX_HOST_GB = 1e12
DEFAULT_PREFIX_GB = 16.0
DEFAULT_PUBLISH_GBPS = 0.1
DEFAULT_PREFIX_WAIT_MS = 1000.0
# What arrives is not what was computed, so there is nothing to verify against.
LOSSY_TRANSFERS: tuple[Transfer, ...] = ("int8", "int4", "cachegen")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class KVSpecConfig:
    """What the user asked for, validated. Built once from flags, then only read.

    host_gb: GiB of host memory for the residual stores of all ranks on a machine; None sizes them
    to hold every page's residual, and on a GPU is 0; 0 keeps all residuals in the KV memory budget
    itself (QuantSpec's setting).
    residual_hbm_fraction: share in [0, 0.9] of the KV memory budget that caches residual pages.
    recent_pages: full pages of the newest tokens kept in full precision, besides the partial page.
    schedule: whether verifications take turns, so that residual traffic hides behind drafting, or
    all requests draft and then all verify; auto is the first on a CPU and the second on a GPU.
    stream: how the tokens of a round reach a stream: one by one over the time of the next round, or
    all at once.
    prefix_host_gb: GiB of host memory for prefixes that the KV cache had no more room for, of all
    ranks on a machine.
    prefix_hbm_fraction: share in [0, 0.9] of the KV memory budget that keeps the anchors of such
    prefixes, whose residuals come back from host memory or disk.
    prefix_dir: folder that keeps prefixes over restarts, in up to prefix_gb GiB, of all ranks on a
    machine; None for none.
    prefix_server: address of a prefix server, tcp://host:port, that several servers share; None for
    none. Off loopback it needs prefix_server_keys, a folder of CURVE certificates.
    prefix_publish_gbps: GB/s (1e9 bytes) of finished prefixes that a server's ranks together
    send it at most; 0 for none.
    prefix_wait_ms: how long a request stays in the queue at most for pages that it may send.
    transfer: how KV goes from a prefill to a decode server; all but split are to compare with.
    link_gbps: GB/s (1e9 bytes) that a prefill server sends at most; None for no limit.
    transfer_host: address that a prefill server sends from; off loopback it needs transfer_keys, a
    folder of CURVE certificates.
    """

    target: Target = "exact"
    codec: CodecName = "uniform4"
    draft_len: int | Literal["auto"] = "auto"
    recent_pages: int = 1
    host_gb: float | None = None
    residual_hbm_fraction: float = 0.25
    schedule: Schedule = "auto"
    stream: Stream = "paced"
    prefix_host_gb: float = 0
    prefix_hbm_fraction: float = 0
    prefix_dir: str | None = None
    prefix_gb: float | None = None
    prefix_server: str | None = None
    prefix_server_keys: str | None = None
    prefix_publish_gbps: float | None = None
    prefix_wait_ms: float | None = None
    transfer: Transfer = "split"
    link_gbps: float | None = None
    transfer_host: str = LOOPBACK
    transfer_keys: str | None = None

    def __post_init__(self) -> None:
        _check_choice("--kvspec-target", self.target, get_args(Target))
        _check_choice("--kvspec-codec", self.codec, get_args(CodecName))
        _check_choice("--kvspec-schedule", self.schedule, get_args(Schedule))
        _check_choice("--kvspec-stream", self.stream, get_args(Stream))
        if self.draft_len != AUTO_DRAFT_LEN and not (
            type(self.draft_len) is int and 0 <= self.draft_len <= MAX_DRAFT_LEN
        ):
            raise ConfigError(
                f"--kvspec-draft-len must be 'auto' or an integer from 0 to {MAX_DRAFT_LEN}, "
                f"got {self.draft_len!r}"
            )
        if type(self.recent_pages) is not int or not 1 <= self.recent_pages <= MOST_RECENT_PAGES:
            raise ConfigError(
                f"--kvspec-recent-pages must be an integer from 1 to {MOST_RECENT_PAGES}, "
                f"got {self.recent_pages!r}"
            )
        if self.host_gb is not None and not _is_between(self.host_gb, 0, MAX_HOST_GB):
            raise ConfigError(
                f"--kvspec-host-gb must be >= 0 and finite (GiB), got {self.host_gb!r}"
            )
        if not _is_between(self.residual_hbm_fraction, 0, 0.9):
            raise ConfigError(
                "--kvspec-residual-hbm-fraction must be between 0 and 0.9, "
                f"got {self.residual_hbm_fraction!r}"
            )
        if not _is_between(self.prefix_host_gb, 0, MAX_HOST_GB):
            raise ConfigError(
                f"--kvspec-prefix-host-gb must be >= 0 and finite (GiB), got "
                f"{self.prefix_host_gb!r}"
            )
        if self.prefix_gb is not None and not (
            _is_between(self.prefix_gb, 0, MAX_HOST_GB) and self.prefix_gb
        ):
            raise ConfigError(
                f"--kvspec-prefix-gb must be > 0 and finite (GiB), got {self.prefix_gb!r}"
            )
        if self.prefix_dir is None and self.prefix_gb is not None:
            raise ConfigError(
                f"--kvspec-prefix-gb {self.prefix_gb:g} has no effect without --kvspec-prefix-dir"
            )
        if self.prefix_dir is not None and not (self.prefix_dir and type(self.prefix_dir) is str):
            raise ConfigError(f"--kvspec-prefix-dir must be a folder, got {self.prefix_dir!r}")
        self._check_kept_anchors()
        self._check_prefix_server()
        self._check_transfer()

    def _check_kept_anchors(self) -> None:
        flag, share = "--kvspec-prefix-hbm-fraction", self.prefix_hbm_fraction
        if not _is_between(share, 0, 0.9):
            raise ConfigError(f"{flag} must be between 0 and 0.9, got {share!r}")
        if share and not (self.prefix_host_gb or self.prefix_dir):
            raise ConfigError(
                f"{flag} {share:g} has no effect without --kvspec-prefix-host-gb or "
                "--kvspec-prefix-dir, where residuals of kept anchors would be"
            )

    def _check_prefix_server(self) -> None:
        for name in ("prefix_server", "prefix_server_keys"):
            value = getattr(self, name)
            if value is not None and not (value and type(value) is str):
                flag = "--kvspec-" + name.replace("_", "-")
                raise ConfigError(f"{flag} must not be empty, got {value!r}")
        for name, unit in (("prefix_publish_gbps", "GB/s"), ("prefix_wait_ms", "ms")):
            value = getattr(self, name)
            if value is not None and not _is_between(value, 0, MAX_HOST_GB):
                flag = "--kvspec-" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be >= 0 and finite ({unit}), got {value!r}")
        if self.prefix_server is not None:
            return
        for name in ("prefix_server_keys", "prefix_publish_gbps", "prefix_wait_ms"):
            if getattr(self, name) is not None:
                flag = "--kvspec-" + name.replace("_", "-")
                raise ConfigError(
                    f"{flag} {getattr(self, name)} has no effect without --kvspec-prefix-server"
                )

    def _check_transfer(self) -> None:
        _check_choice("--kvspec-transfer", self.transfer, get_args(Transfer))
        if self.transfer != "split" and self.target != "exact":
            raise ConfigError(
                f"--kvspec-transfer {self.transfer} sends what the model wrote, or less, and "
                f"cannot be combined with --kvspec-target {self.target} (allowed: exact)"
            )
        if self.transfer in LOSSY_TRANSFERS and self.draft_len not in (AUTO_DRAFT_LEN, 0):
            raise ConfigError(
                f"--kvspec-draft-len {self.draft_len} has no effect with --kvspec-transfer "
                f"{self.transfer}, which leaves nothing to verify against (allowed: auto, 0)"
            )
        if self.link_gbps is not None and not (
            _is_between(self.link_gbps, 0, MAX_HOST_GB) and self.link_gbps
        ):
            raise ConfigError(
                f"--kvspec-link-gbps must be > 0 and finite (GB/s), got {self.link_gbps!r}"
            )

    @property
    def max_draft_len(self) -> int:
        """Most tokens a request may draft before it must verify."""
        if not self.drafts:
            return 0
        if self.draft_len == AUTO_DRAFT_LEN:
            return MOST_AUTO_DRAFTS_HOSTED if self.host_gb else MOST_AUTO_DRAFTS
        return int(self.draft_len)

    @property
    def keeps_prefixes(self) -> bool:
        """Whether prefixes outlive their place in the KV cache."""
        return bool(self.prefix_host_gb) or bool(self.prefix_dir or self.prefix_server)

    @property
    def prefix_disk_gb(self) -> float:
        return DEFAULT_PREFIX_GB if self.prefix_gb is None else self.prefix_gb

    @property
    def publish_gbps(self) -> float:
        asked = self.prefix_publish_gbps
        return DEFAULT_PUBLISH_GBPS if asked is None else asked

    @property
    def prefix_wait_s(self) -> float:
        asked = self.prefix_wait_ms
        return (DEFAULT_PREFIX_WAIT_MS if asked is None else asked) / 1000

    @property
    def drafts(self) -> bool:
        return self.draft_len != 0 and not self.is_lossy

    @property
    def is_lossy(self) -> bool:
        """Whether a decode server answers from KV that is not what the prefill server computed."""
        return self.transfer in LOSSY_TRANSFERS

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> KVSpecConfig:
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown kvspec option {unknown[0]!r}, allowed: {sorted(known)}")
        return cls(**values)


def _is_between(value: object, least: float, most: float) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and least <= value <= most  # type: ignore[operator]


def _check_choice(flag: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} must be one of {', '.join(allowed)}, got {value!r}")
