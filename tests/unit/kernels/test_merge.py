"""Merged attention states, by the reference and by readers of the lse that kernels return."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvspec_kernels.formats import Log4Settings, Uniform4Settings
from kvspec_kernels.reference.attention import attend, merge_states
from kvspec_testkit.kernels.cases import make_case, results_for
from kvspec_testkit.kernels.comparison import assert_attention

HEADS, HEAD_DIM = 3, 16


def attend_to(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return attend(q, k, v, torch.full((len(q),), len(k)), 0.5)


@pytest.mark.parametrize("split", [0, 1, 20, 39, 40])
def test_merged_parts_are_the_whole(split):
    rng = torch.Generator().manual_seed(1)
    q = torch.randn(5, HEADS, HEAD_DIM, generator=rng)
    k, v = torch.randn(2, 40, HEADS, HEAD_DIM, generator=rng)
    out, lse = attend_to(k, v, q)
    first, second = attend_to(k[:split], v[:split], q), attend_to(k[split:], v[split:], q)
    for parts in (first + second, second + first):
        merged, merged_lse = merge_states(*parts)
        torch.testing.assert_close(merged, out, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(merged_lse, lse, atol=1e-6, rtol=1e-6)


def test_lse_is_to_base_2_of_the_scaled_scores():
    one = torch.ones(1, 1, HEAD_DIM)
    k, v = one.expand(4, 1, HEAD_DIM), torch.arange(4.0)[:, None, None].expand(4, 1, HEAD_DIM)
    out, lse = attend_to(k, v, one)
    # Four tokens of score 0.5 * 16 = 8.
    assert lse.item() == pytest.approx(2 + 8 * torch.tensor(torch.e).log2().item())
    assert out.flatten().tolist() == pytest.approx([1.5] * HEAD_DIM)


def test_parts_without_tokens():
    """The output of an empty part has no effect, even if it is NaN."""
    out, lse = torch.randn(2, HEADS, HEAD_DIM), torch.randn(2, HEADS)
    junk, none = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    for parts in ((out, lse, junk, none), (junk, none, out, lse)):
        merged, merged_lse = merge_states(*parts)
        assert torch.equal(merged, out)
        torch.testing.assert_close(merged_lse, lse)
    merged, merged_lse = merge_states(junk, none, junk, none)
    assert torch.equal(merged, torch.zeros_like(out))
    assert torch.equal(merged_lse, none)


def test_distant_states_do_not_overflow():
    out = torch.ones(1, 1, HEAD_DIM)
    merged, lse = merge_states(out, torch.tensor([[3000.0]]), -out, torch.tensor([[-3000.0]]))
    assert torch.equal(merged, out)
    assert lse.item() == 3000


@pytest.mark.parametrize(
    ("source", "settings"),
    [("anchor", Log4Settings()), ("int8", Uniform4Settings())],
    ids=["draft", "verify"],
)
def test_past_and_tail_run_separately_merge_to_the_whole(source, settings, prepare, device):
    """A caller may let another kernel, such as FlashInfer's, attend to the recent window."""
    case = make_case(
        [130, 0, 1, 0], tail_lens=[3, 65, 0, 0], source=source, settings=settings, device=device
    )
    states = []
    past = dataclasses.replace(case, tail=None)
    for part in (past, case.shortened([0, 0, 0, 0])):
        out, lse = results_for(part)
        prepare(part)(out, lse)
        states += [out, lse]
    merged, lse = merge_states(*states)
    # Each part and the merged result are rounded to bf16 once.
    assert_attention(case, merged.to(case.q.dtype), lse, factor=3.0)


@pytest.mark.gpu
def test_flashinfer_merges_alike(device):
    flashinfer = pytest.importorskip("flashinfer")
    rng = torch.Generator(device).manual_seed(2)
    out = torch.randn(2, 64, 8, 128, generator=rng, device=device).bfloat16()
    lse = 8 * torch.randn(2, 64, 8, generator=rng, device=device)
    got, got_lse = flashinfer.merge_state(out[0], lse[0], out[1], lse[1])
    want, want_lse = merge_states(out[0], lse[0], out[1], lse[1])
    # One rounding to bf16: half a unit in the last place, for values up to about 4.
    torch.testing.assert_close(got.float(), want, atol=2**-7, rtol=2**-8)
    torch.testing.assert_close(got_lse, want_lse, atol=1e-4, rtol=1e-6)
