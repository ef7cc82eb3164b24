"""Operators of a target's forward under deterministic inference: the bits of a row do not depend on
the other rows. Products and attention have tests of their own, in tests/unit/kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_kvspec.adapters.compat import batch_invariance

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo-5m"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 32, 8, 128, 32000
ROWS = 1000
# A step, verifications, and part of a prompt.
COUNTS = (1, 2, 13, 64, 65, 208, 999)

Operator = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(MODEL)))
    batch_invariance.enable_batch_invariant_mode()
    yield
    batch_invariance.disable_batch_invariant_mode()


def norm() -> Operator:
    return RMSNorm(HIDDEN).cuda().bfloat16()


def norm_of_a_sum() -> Operator:
    layer = RMSNorm(HIDDEN).cuda().bfloat16()
    return lambda rows: torch.stack(layer(rows.clone(), rows.flip(1).clone()))


def activation() -> Operator:
    return SiluAndMul()


def rotation() -> Operator:
    rope = get_rope(HEAD_DIM, HEAD_DIM, 65536, 500000, True).cuda()

    def rotate(rows: torch.Tensor) -> torch.Tensor:
        # The kernel writes in place.
        q = rows[:, : HEADS * HEAD_DIM].clone()
        k = rows[:, : KV_HEADS * HEAD_DIM].clone()
        # A row's position must not depend on where the row lies: its largest value decides.
        positions = rows.float().abs().amax(dim=1).mul(1000).long() % 65536
        return torch.cat(rope(positions, q, k), dim=1)

    return rotate


def log_probabilities() -> Operator:
    return lambda rows: torch.log_softmax(rows.repeat(1, VOCAB // HIDDEN).float(), dim=-1)


@pytest.mark.parametrize(
    "make", [norm, norm_of_a_sum, activation, rotation, log_probabilities], ids=lambda f: f.__name__
)
def test_rows_do_not_depend_on_their_number(make: Callable[[], Operator]) -> None:
    torch.manual_seed(0)
    operator = make()
    rows = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16()
    whole = operator(rows)
    for count in COUNTS:
        for start in {0, 123 % (ROWS - count + 1), ROWS - count}:
            part = slice(start, start + count)
            out = operator(rows[part].clone())
            assert torch.equal(out, whole[..., part, :]), (start, count)
