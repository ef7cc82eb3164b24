"""The Llama of the acceptance benchmark, and its counts of accepted drafts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "models" / "demo-5m"


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_path():
    """Put the benchmarks on sys.path: they are scripts, not an installed package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def demo_model():
    if not (DEMO / "model.safetensors").exists():
        pytest.skip(f"{DEMO} is not here")
    from acceptance.model import Llama

    return Llama(DEMO, torch.device("cpu"))


@pytest.fixture(scope="module")
def target(demo_model):
    from acceptance.drafting import target_run

    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 4096, (3, 256), generator=rng)
    return target_run(demo_model, prompts, steps=6, prefill_batch=2)


def test_prefill_and_decode_equal_transformers(demo_model):
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(2, 4096, (2, 40), generator=torch.Generator().manual_seed(1))
    theirs = transformers.LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    with torch.inference_mode():
        want = theirs(tokens).logits
    cache, first, _ = demo_model.prefill(tokens[:, :32], spare=8)
    got = [first]
    got += [demo_model.decode(tokens[:, t], t, cache)[0] for t in range(32, 40)]
    # fp32 sums have another order, and logits are of the order of ten.
    torch.testing.assert_close(torch.stack(got, 1), want[:, 31:], rtol=0, atol=2e-4)


@pytest.mark.parametrize("page_size", [32, 64])
def test_exact_pages_are_accepted_in_full(demo_model, target, page_size):
    from acceptance.drafting import accepted_lengths, attention_vnmse, draft_cache

    cache = draft_cache(target, lambda k, v: (k, v), page_size)
    for got, want in zip(cache, target.cache, strict=True):
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
    assert attention_vnmse(target, cache).tolist() == [0.0] * 3
    assert accepted_lengths(demo_model, target, cache).tolist() == [6] * 3


def test_only_pages_before_the_newest_are_encoded(target):
    from acceptance.drafting import draft_cache

    seen = []

    def record(k, v):
        seen.append(k)
        return torch.zeros_like(k), v

    cache = draft_cache(target, record, page_size=64)
    # 256 tokens are four pages. The recent window keeps the last one.
    assert seen[0].shape == (3 * 3, 64, 2, 64)
    want = target.cache[0][0]
    assert torch.equal(seen[0][:3].flatten(0, 1), want[0, :, :192].transpose(0, 1))
    assert not cache[0][0][:, :, :192].any()
    assert torch.equal(cache[0][0][:, :, 192:], want[:, :, 192:])
    assert torch.equal(cache[0][1], target.cache[0][1])


def test_accepted_length_stops_at_the_first_disagreement(demo_model, target):
    from acceptance.drafting import TargetRun, accepted_lengths, draft_cache

    tokens = target.tokens.clone()
    tokens[1, 3] = (tokens[1, 3] + 1) % 4096
    tokens[2, 1] = (tokens[2, 1] + 1) % 4096
    queries = (target.queries, target.prompt_queries)
    altered = TargetRun(target.prompt_len, tokens, target.cache, *queries)
    cache = draft_cache(altered, lambda k, v: (k, v), page_size=64)
    assert accepted_lengths(demo_model, altered, cache).tolist() == [6, 2, 0]


def test_attention_error_of_zeroed_values(target):
    from acceptance.drafting import attention_vnmse

    cache = [(k, torch.zeros_like(v)) for k, v in target.cache]
    assert attention_vnmse(target, cache).tolist() == pytest.approx([1.0] * 3)
