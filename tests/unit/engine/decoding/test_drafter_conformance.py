"""Conformance tests of any drafter. Another package can run this file with its own drafter in
DRAFTERS."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from kvspec_testkit.doc_examples import load_example
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import DrafterError
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.checked_drafter import CheckedDrafter
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams

PLUGINS = Path(__file__).parents[3] / "plugins"
GREEDY = SamplingParams(top_k=1)
SEEDED = SamplingParams(temperature=0.8, top_k=12, top_p=0.95, seed=11)
SAMPLED = SamplingParams(temperature=0.8)
VOCAB = 200


def toy_drafter():
    spec = importlib.util.spec_from_file_location("toy_drafter", PLUGINS / "toy_drafter.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.OutputLookup(KVSpecConfig(), VOCAB)


# None: the model itself.
DRAFTERS = {
    "self": lambda: None,
    "output lookup": toy_drafter,
    "example": lambda: load_example("new-drafter.md").Bigrams(KVSpecConfig(), VOCAB),
}
every_drafter = pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)


def requests(toy, params):
    rng = torch.Generator().manual_seed(5)
    lengths = [(70, 60), (33, 60), (100, 54), (64, 63)]
    return [
        toy.Request(torch.randint(toy.vocab, (n,), generator=rng).tolist(), new, params)
        for n, new in lengths
    ]


@every_drafter
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("pools", [{"cache_pages": None}, {"num_pages": 32, "cache_pages": 8}])
def test_output_is_that_of_plain_decoding(toy, make, params, pools):
    plain = [toy.plain_decode(toy.model, request) for request in requests(toy, params)]
    engine = toy.RoundEngine(toy.kv(**pools), toy.model, KVSpecConfig(), drafter=make())
    toy.assert_same_output(engine.serve(requests(toy, params)), plain)
    # Without drafts the comparison would not test them.
    assert engine.counters.drafted


def state_of(rid, params=GREEDY, drafts=()):
    output = [7, 8, 9, 10, 7, 8]
    probs = [torch.full((VOCAB,), 1 / VOCAB)] * len(drafts)
    return RequestState(rid, 64, 8, output, params, 100, drafts=list(drafts), draft_probs=probs)


@pytest.mark.parametrize("lens", [[3, 0, 2, 1], [0, 0, 0, 1]])
def test_a_drafter_appends_as_many_as_it_is_asked_for_and_changes_nothing_else(lens):
    states = [state_of("a"), state_of("b"), state_of("c", SEEDED), state_of("d", drafts=[9])]
    kept = [(list(s.drafts), list(s.output), s.committed_len, s.pending) for s in states]
    batch = RoundBatch(states, [torch.arange(4)] * 4, [None] * 4)
    assert CheckedDrafter("toy", toy_drafter(), VOCAB).draft(batch, lens) is None
    for state, most, (drafts, output, committed_len, pending) in zip(
        states, lens, kept, strict=True
    ):
        assert state.drafts[: len(drafts)] == drafts
        assert len(state.drafts) - len(drafts) <= most
        assert (state.output, state.committed_len, state.pending) == (
            output,
            committed_len,
            pending,
        )
    assert any(
        len(state.drafts) > len(drafts) for state, (drafts, *_) in zip(states, kept, strict=True)
    )


class Wrong:
    def __init__(self, drafts):
        self.drafts = drafts

    def draft(self, batch, lens):
        for state in batch.states:
            state.drafts.extend(self.drafts)


@pytest.mark.parametrize(
    ("params", "drafts", "told"),
    [
        (GREEDY, [1, 2, 3], r"other made 3 drafts for request a \(allowed: at most 2\)"),
        (GREEDY, [1, VOCAB], rf"token {VOCAB} for request a \(allowed: 0 to {VOCAB - 1}\)"),
        (GREEDY, [-1], "token -1"),
        (SAMPLED, [1], "0 distributions for 1 drafts of sampled request a"),
    ],
)
def test_wrong_drafts_are_refused(params, drafts, told):
    batch = RoundBatch([state_of("a", params)], [torch.arange(4)], [None])
    with pytest.raises(DrafterError, match=told):
        CheckedDrafter("other", Wrong(drafts), VOCAB).draft(batch, [2])


def test_drafts_that_are_wrong_as_tokens_change_no_output(toy):
    class Noise:
        def draft(self, batch, lens):
            for state, most in zip(batch.states, lens, strict=True):
                state.drafts.extend([3] * most)

    plain = [toy.plain_decode(toy.model, request) for request in requests(toy, GREEDY)]
    engine = toy.RoundEngine(toy.kv(), toy.model, KVSpecConfig(), drafter=Noise())
    toy.assert_same_output(engine.serve(requests(toy, GREEDY)), plain)
    assert engine.counters.rejected > engine.counters.accepted
