"""Speeds of GPUs: published figures, and the share of each that is reached.

Shares were measured on one H200. A test compares them with the microseconds in
benchmarks/results/attention_h200.json and attention_triton.json. On other GPUs the same shares are
assumed, those of CUDA kernels on Hopper and those of Triton kernels elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sglang_kvspec.core.config import Target
from sglang_kvspec.core.errors import ConfigError

GB = 10**9

# Share of the published HBM bandwidth at which BF16 KV is read (FlashInfer, 16 x 32768 tokens).
# Weights are taken to be read as fast, which fits plain decode steps of an 8B model: 5.43, 12.41
# and 19.92 ms for 1, 8 and 16 requests of 32768 tokens.
READ_SHARE = 0.913
# Rest of the time of those steps: 1.0 ms for 32 layers.
LAYER_OVERHEAD_S = 32e-6
# Encoding a layer's full pages, beside appending to the recent window: 5.6 us with uniform4, 7.2 us
# with log4.
LAYER_ENCODE_S = 6e-6
# Draft attention over a list of pages takes 11 to 15 us a layer beside the time of its bytes, from
# 16 requests of 32768 tokens to 11 of 131072 (benchmarks/results/page_selection.json).
LAYER_LISTS_S = 13e-6
# Assumed: matrix products of some hundred rows reach this share of the published FLOP/s.
DENSE_SHARE = 0.6
# Assumed time of each of the two all-reduces of a layer under tensor parallelism.
ALL_REDUCE_S = 10e-6
# Pinned copies on PCIe 5 x16 reached 55 of 64 GB/s (H200). Other links are assumed to do the same.
LINK_SHARE = 0.86
# Assumed share of a large HBM that SGLang leaves to weights and KV (--mem-fraction-static).
MEMORY_SHARE = 0.88


@dataclass(frozen=True, slots=True)
class Device:
    """Published figures of one GPU: HBM bytes and bytes/s, link bytes/s one way, BF16 FLOP/s.

    link_share: share of the link's bandwidth that copies of whole pages reach. has_figures: CUDA
    kernels cover the GPU. Any other takes Triton kernels, which were not measured there: a plan is
    an estimate only.
    """

    name: str
    hbm_bytes: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    flops: float
    link_share: float = LINK_SHARE
    has_figures: bool = False

    @property
    def read_bytes_per_s(self) -> float:
        """Speed at which weights and plain KV are read."""
        return self.hbm_bytes_per_s * READ_SHARE

    @property
    def fetch_bytes_per_s(self) -> float:
        """Speed at which residuals are fetched from host memory."""
        return self.link_bytes_per_s * self.link_share

    @property
    def usable_flops(self) -> float:
        return self.flops * DENSE_SHARE

    def with_link(self, fetch_bytes_per_s: float) -> Device:
        """Return the same GPU on a link of the given, measured bandwidth. Raises ConfigError unless
        it is positive and finite."""
        if not 0 < fetch_bytes_per_s < float("inf"):
            raise ConfigError(
                f"--link-gbps must be positive and finite, got {fetch_bytes_per_s / GB:g}"
            )
        return replace(self, link_bytes_per_s=fetch_bytes_per_s, link_share=1.0)


@dataclass(frozen=True, slots=True)
class AttentionShares:
    """Shares of the published speeds that attention reaches.

    draft: share of HBM bandwidth, reading anchors. verify: the same, reading anchors and residuals.
    verify_flops: share of dense BF16 FLOP/s if reads took no time
    (`IterationCosts.verify_attention_seconds`).
    """

    draft: float
    verify: float
    verify_flops: float


# Shares of our CUDA kernels, measured with the target `int8`. `exact` verifies on plain values:
# there FlashInfer's prefill kernel over BF16 pages stands in for our kernel, which has no figure.
CUDA_SHARES: Mapping[tuple[str, Target], AttentionShares] = {
    ("log4", "int8"): AttentionShares(draft=0.74, verify=0.75, verify_flops=0.377),
    ("uniform4", "int8"): AttentionShares(draft=0.79, verify=0.77, verify_flops=0.392),
    ("log4", "exact"): AttentionShares(draft=0.74, verify=0.91, verify_flops=0.343),
    ("uniform4", "exact"): AttentionShares(draft=0.79, verify=0.91, verify_flops=0.343),
}
# The same of our Triton kernels, on the same GPU.
TRITON_SHARES: Mapping[tuple[str, Target], AttentionShares] = {
    ("log4", "int8"): AttentionShares(draft=0.078, verify=0.101, verify_flops=0.065),
    ("uniform4", "int8"): AttentionShares(draft=0.57, verify=0.42, verify_flops=0.232),
    ("log4", "exact"): AttentionShares(draft=0.078, verify=0.91, verify_flops=0.343),
    ("uniform4", "exact"): AttentionShares(draft=0.57, verify=0.91, verify_flops=0.343),
}

# Share of HBM bandwidth at which packed residuals and anchors are read to be unpacked
# (benchmarks/results/packed_exact_kernels.json).
UNPACK_SHARE = 0.076

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("A100-80GB", 80 * GB, 2.039e12, 32e9, 312e12),
        Device("H100", 80 * GB, 3.35e12, 64e9, 989e12, has_figures=True),
        Device("H100-NVL", 94 * GB, 3.9e12, 64e9, 835e12, has_figures=True),
        Device("H200", 141 * GB, 4.8e12, 64e9, 989e12, has_figures=True),
        Device("GH200", 96 * GB, 4.0e12, 450e9, 989e12, has_figures=True),
        Device("B200", 180 * GB, 8.0e12, 64e9, 2250e12),
        Device("L40S", 48 * GB, 0.864e12, 32e9, 362e12),
        Device("RTX-PRO-6000", 96 * GB, 1.792e12, 64e9, 504e12),
    )
}

# Names that the driver gives GPUs.
PRODUCTS: Mapping[str, str] = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H200": "H200",
    "NVIDIA GH200 480GB": "GH200",
}

_ALL_MEASURED = "kernels and servers were measured on this GPU"
_KERNELS_TESTED = "these kernels were tested on this GPU, servers with them were not"
# Measurements by the driver's name of the GPU and the back end of the kernels.
MEASURED: Mapping[tuple[str, str], str] = {
    ("NVIDIA H200", "cuda"): _ALL_MEASURED,
    ("NVIDIA H200", "triton"): _ALL_MEASURED,
    ("NVIDIA H100 80GB HBM3", "cuda"): _ALL_MEASURED,
    ("NVIDIA H100 80GB HBM3", "triton"): _KERNELS_TESTED,
}
NOT_MEASURED = "nothing was measured on this GPU"


def attention_shares(device: Device, codec: str, target: Target) -> AttentionShares:
    """Return the shares of the kernels that a device takes."""
    return (CUDA_SHARES if device.has_figures else TRITON_SHARES)[codec, target]


def measured_on(name: str, kernels: str) -> str:
    """Return what was measured of a back end, "cuda" or "triton", on the GPU that the driver calls
    so."""
    return MEASURED.get((name, kernels), NOT_MEASURED)


def find_device(name: str) -> Device:
    """Return the GPU of that name; case is ignored. Raises ConfigError naming the known GPUs."""
    for known, device in DEVICES.items():
        if known.lower() == name.lower():
            return device
    raise ConfigError(f"--gpu must be one of {', '.join(sorted(DEVICES))}, got {name!r}")
