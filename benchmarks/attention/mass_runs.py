"""Attention mass of pages as a by-product of verification: the kernel of the int8 target with a few
lines more, which leave the log-sum-exp of every query row over every page.

The product has no such kernel. Its lines are put into the text of cuda/verify_attention.cu here.
Each must find its place exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from attention.kvspec_runs import records, refined_bytes
from attention.shapes import HEAD_DIM, KV_HEADS, PAGE_SIZE, QO_HEADS, Shape
from kvspec_kernels.codecs import CodecSpec
from kvspec_kernels.jit import nvrtc
from kvspec_kernels.jit.cuda_attention import AttentionShape
from kvspec_kernels.jit.cuda_verify import VerifyKernel, columns_and_blocks, verify_defines
from kvspec_kernels.jit.page_selection import page_mass_kernel
from kvspec_kernels.ops.page_selection import MASS_TILE

GROUP = QO_HEADS // KV_HEADS
BF16 = torch.bfloat16
SOURCE = "verify_attention.cu"
# Text of the kernel, and what takes its place.
EDITS = (
    (
        "void* __restrict__ out, float* __restrict__ lse) {\n    extern",
        "void* __restrict__ out, float* __restrict__ lse, float* __restrict__ page_lse) {\n"
        "    static_assert(SHARES == 1);\n    extern",
    ),
    (
        "float sums[PASSES][4] = {}, result",
        "float totals[PASSES][4] = {}, sums[PASSES][4] = {}, result",
    ),
    (
        "sums[pass][0] *= shrink(c);",
        "totals[pass][0] *= shrink(c), totals[pass][2] *= shrink(c + 8);\n"
        "                    sums[pass][0] *= shrink(c);",
    ),
    # Past its last step a page's sum is complete. No warp moves a maximum before all are here.
    (
        "                    warpgroup_commit();\n                }\n            }\n        };\n",
        """                    warpgroup_commit();
                }
            }
            constexpr int ROWS = PAGE_ROWS;
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int c = pass * PASS_COLUMNS * 8 + sum_column + 8 * half;
                    float x = sums[pass][2 * half];
                    if (!IN_TAIL && t == 0 && c < s.num_columns)
                        page_lse[((i64)(first_index + page + i) * num_kv_heads + s.head) * ROWS +
                                 s.block * COLS + c] = tops[c] + log2f(x);
                    totals[pass][2 * half] += x;
                    sums[pass][2 * half] = 0.0f;
                }
        };
""",
    ),
    ("sum[0] = sums[pass][0];", "sum[0] = totals[pass][0];"),
    ("sum[8] = sums[pass][2];", "sum[8] = totals[pass][2];"),
)


class Verifying:
    """Verification of `num_new` tokens of every request over encoded pages alone, by the kernel as
    it is, and with the mass of pages of the last `num_queries` tokens."""

    def __init__(
        self, settings: CodecSpec, shape: Shape, num_new: int, num_queries: int, folder: Path
    ) -> None:
        """folder: where the changed source goes."""
        self.shape, self.num_new, self.num_queries = shape, num_new, num_queries
        batch, device = shape.batch, torch.device("cuda", torch.cuda.current_device())
        geometry = AttentionShape(settings, PAGE_SIZE, HEAD_DIM, QO_HEADS, KV_HEADS, BF16)
        self.copies = shape.rotations(shape.num_pages * KV_HEADS * refined_bytes(settings))
        self.indptr, self.lists, self.last = shape.page_tables(self.copies)
        self.anchors, self.residuals = records(settings, shape.num_pages * self.copies)
        self.residual_slots = torch.randperm(len(self.residuals), device=device).int()
        steps = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self.qo_indptr = steps * num_new
        self.q = torch.randn(batch * num_new, QO_HEADS, HEAD_DIM, device=device).bfloat16()
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(self.q.shape[:2], device=device)
        self.page_lse = torch.zeros(shape.num_pages, KV_HEADS, num_new * GROUP, device=device)
        self.mass = torch.zeros(batch, KV_HEADS, shape.context // PAGE_SIZE, device=device)
        self.slots, self.zeros = steps[:-1].contiguous(), torch.zeros_like(steps[:-1])
        self.counts = torch.full_like(self.slots, num_queries)
        self.kernel = VerifyKernel(geometry, num_new, device, 0)
        self.changed = VerifyKernel(geometry, num_new, device, 0)
        columns, blocks = columns_and_blocks(geometry, num_new * GROUP)
        defines = verify_defines(geometry, columns, blocks) | {"PAGE_ROWS": num_new * GROUP}
        (kernel,) = nvrtc.load(str(changed_source(folder)), ("verify_attention",), defines, device)
        kernel.allow_shared_memory(self.kernel._shared)
        self.changed._verify = _OneMore(kernel, self.page_lse)  # type: ignore[assignment]
        nbytes = self.kernel.workspace_bytes(batch, shape.num_pages)
        self.workspace = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def calls(self, kernel: VerifyKernel) -> list[Callable[[], object]]:
        """Return calls of one layer's verification."""

        def call_on(pages: torch.Tensor) -> Callable[[], object]:
            return lambda: kernel.run(
                self.q,
                self.anchors,
                self.residuals,
                self.residual_slots,
                self.qo_indptr,
                self.indptr,
                pages,
                self.last,
                None,
                HEAD_DIM**-0.5,
                self.shape.num_pages,
                self.workspace,
                self.out,
                self.lse,
            )

        return [call_on(pages) for pages in self.lists]

    def calls_with_mass(self) -> list[Callable[[], object]]:
        """Return calls that verify, and write the mass of pages."""

        def with_mass(verify: Callable[[], object]) -> Callable[[], object]:
            def call() -> None:
                verify()
                self.sum_mass()

            return call

        return [with_mass(call) for call in self.calls(self.changed)]

    def sum_mass(self) -> None:
        """Write the mass of pages, from the log-sum-exps of the last queries."""
        num_rows = self.num_new * GROUP
        block_m = max(16, 1 << (self.num_queries * GROUP - 1).bit_length())
        page_mass_kernel[(self.shape.batch, KV_HEADS)](
            lse_ptr=self.page_lse[..., num_rows - self.num_queries * GROUP :],
            indptr_ptr=self.indptr,
            num_queries_ptr=self.counts,
            slots_ptr=self.slots,
            num_known_ptr=self.zeros,
            mass_ptr=self.mass,
            stride_mass_slot=self.mass.stride(0),
            stride_mass_head=self.mass.stride(1),
            NUM_KV_HEADS=KV_HEADS,
            GROUP=GROUP,
            NUM_ROWS=num_rows,
            BLOCK_M=block_m,
            BLOCK_P=MASS_TILE // block_m,
            num_warps=4,
        )

    def largest_error(self) -> float:
        """Return the largest difference between a row's log-sum-exp over all tokens, by the kernel
        as it is, and over the pages that the changed kernel reports."""
        self.calls(self.kernel)[0]()
        whole = self.lse.clone()
        self.calls(self.changed)[0]()
        pages = self.page_lse.view(self.shape.batch, -1, KV_HEADS, self.num_new, GROUP)
        found = torch.logsumexp(pages * math.log(2), dim=1) / math.log(2)
        found = found.permute(0, 2, 1, 3).reshape(whole.shape)
        return float((found - whole).abs().max())


class _OneMore:
    """A kernel that takes one argument more."""

    def __init__(self, kernel: nvrtc.Kernel, argument: torch.Tensor) -> None:
        self._kernel, self._argument = kernel, argument

    def launch(
        self, grid: int, block: int, arguments: Sequence[Any], shared_memory: int = 0
    ) -> None:
        self._kernel.launch(grid, block, (*arguments, self._argument), shared_memory)


def changed_source(folder: Path) -> Path:
    """Write the kernel with EDITS, and return its path. Raises ValueError if the kernel has
    changed so that an edit does not fit."""
    text = (nvrtc.SOURCES / SOURCE).read_text()
    for old, new in EDITS:
        if text.count(old) != 1:
            raise ValueError(f"{SOURCE} has {text.count(old)} times: {old}")
        text = text.replace(old, new)
    path = folder / SOURCE
    path.write_text(text)
    return path
