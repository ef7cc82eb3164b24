"""Dtypes, head sizes, groups and page sizes that each kernel path takes. The checks of launchers
and of a server read them, and the table in the docs is drawn from them. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvspec_kernels.codecs.fields import (
    HEAD_DIM_STEP,
    MAX_HEAD_DIM,
    MAX_PAGE_SIZE,
    MIN_HEAD_DIM,
    PAGE_STEP,
)

HALF = ("bfloat16", "float16")
ALL_HEADS = tuple(range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP))
ALL_PAGES = tuple(range(PAGE_STEP, MAX_PAGE_SIZE + 1, PAGE_STEP))
# Query heads of a KV head.
MAX_GROUP = 16
# Channels of a head whose queries kernels rotate. More take more shared memory than some GPUs have.
MOST_ROTATED = 128


@dataclass(frozen=True, slots=True)
class KernelPath:
    """Sizes that one kernel of an operation takes. Groups of more query heads than most_group have
    no kernel; None: any group.

    kernels: "CUDA" (Hopper), "Triton" or "FlashInfer".
    """

    operation: str
    kernels: str
    head_dims: tuple[int, ...] = ALL_HEADS
    page_sizes: tuple[int, ...] = ALL_PAGES
    dtypes: tuple[str, ...] = HALF
    most_group: int | None = MAX_GROUP

    def takes(self, *, head_dim: int, page_size: int, group: int, dtype: str) -> bool:
        """Return True if the kernel takes these sizes. dtype: its name, such as "bfloat16"."""
        return (
            head_dim in self.head_dims
            and page_size in self.page_sizes
            and 1 <= group <= (self.most_group or group)
            and dtype in self.dtypes
        )


CUDA_DRAFT = KernelPath("drafts, page scores", "CUDA", head_dims=(64, 96, 128, 256))
CUDA_VERIFY = KernelPath(
    "verification, `int8`",
    "CUDA",
    head_dims=(64, 128, 256),
    page_sizes=tuple(size for size in ALL_PAGES if size % 64 == 0),
)
CUDA_ENCODE = KernelPath(
    "encoding",
    "CUDA",
    head_dims=tuple(size for size in ALL_HEADS if size % 32 == 0),
    most_group=None,
)
TRITON_ATTENTION = KernelPath(
    "drafts, page scores, verification", "Triton", dtypes=(*HALF, "float32")
)
TRITON_ENCODE = KernelPath("encoding", "Triton", dtypes=(*HALF, "float32"), most_group=None)
# FlashInfer silently computes something else for head sizes that are not multiples of 64.
EXACT = KernelPath("prefill and verification, `exact`", "FlashInfer", head_dims=(64, 128, 256))
# Not all page sizes with all head sizes: see launch_of() of ops/deterministic_attention.py.
EXACT_IN_ORDER = KernelPath(
    "prefill and verification, `exact`, deterministic",
    "Triton",
    page_sizes=tuple(size for size in ALL_PAGES if size & (size - 1) == 0),
)
PATHS = (
    CUDA_DRAFT,
    CUDA_VERIFY,
    CUDA_ENCODE,
    TRITON_ATTENTION,
    TRITON_ENCODE,
    EXACT,
    EXACT_IN_ORDER,
)
