"""Only requests whose next token cannot be chosen fail, with the status of the cause."""

from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_kvspec.adapters.compat import runtime_context
from sglang_kvspec.adapters.first_tokens import first_tokens
from sglang_kvspec.adapters.requests import fail_without_choice, new_state
from sglang_kvspec.adapters.spec_inputs import KVSpecDraftInput
from sglang_kvspec.adapters.worker import KVSpecWorker
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.engine.loop import RoundResult
from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.spec_sampler import SpecSampler, VerifyResult

VOCAB, CPU = 6, torch.device("cpu")
NAN = float("nan")
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.9, "sampling_seed": 5}
SAMPLED = {"temperature": 0.9}
every_kind = pytest.mark.parametrize(
    "kind", [GREEDY, SEEDED, SAMPLED], ids=["greedy", "seeded", "sampled"]
)


@pytest.fixture(autouse=True)
def schedule(monkeypatch):
    """Settings that SGLang's scheduler publishes when it starts."""
    published = SimpleNamespace(schedule_low_priority_values_first=False)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: published)


class Request(SimpleNamespace):
    __hash__ = object.__hash__

    @property
    def kv(self):
        """Since 0.5.19 SGLang keeps the row of the page table in here."""
        return self


class Allowing:
    """A grammar that allows the same tokens everywhere, and never ends."""

    finished = False

    def __init__(self, *tokens):
        self.tokens = list(tokens)

    def is_terminated(self):
        return False

    def allocate_vocab_mask(self, vocab, rows, device):
        return torch.ones((rows, vocab), dtype=torch.bool)

    def fill_vocab_mask(self, mask, row):
        mask[row] = False
        mask[row, self.tokens] = True

    def accept_token(self, token):
        if token not in self.tokens:
            raise ValueError(token)

    def rollback(self, count):
        pass

    def move_vocab_mask(self, mask, device):
        return mask

    def apply_vocab_mask(self, logits, mask):
        logits.masked_fill_(~mask, float("-inf"))


def make_request(rid="r", *, grammar=None, middle_chunks=0, output=(), **params):
    return Request(
        rid=rid,
        req_pool_idx=3,
        grammar=grammar,
        inflight_middle_chunks=middle_chunks,
        origin_input_ids=[1] * 11,
        output_ids=list(output),
        sampling_params=SamplingParams(max_new_tokens=50, **params),
        tokenizer=None,
        stream=False,
        to_finish=None,
        finished_len=None,
        skip_radix_cache_insert=False,
    )


def assert_failed(req, status, *words):
    assert req.to_finish.status_code == status
    for word in words:
        assert word in req.to_finish.message
    assert req.finished_len == len(req.output_ids)
    assert req.skip_radix_cache_insert


def assert_goes_on(*reqs):
    for req in reqs:
        assert req.to_finish is None
        assert req.finished_len is None
        assert not req.skip_radix_cache_insert


CAUSES = {
    "grammar": {"grammar": Allowing()},
    "logit_bias": {"logit_bias": {"1": 3e38}},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": -0.5},
    "repetition_penalty": {"repetition_penalty": 1e-38},
    "min_new_tokens": {"min_new_tokens": 3},
}


@pytest.mark.parametrize("cause", CAUSES)
def test_causes_in_the_request_are_answered_with_400(cause, caplog):
    req = make_request(output=(1, 2), **CAUSES[cause])
    fail_without_choice(req)
    assert_failed(req, HTTPStatus.BAD_REQUEST, "correct", cause)
    assert not any(other in req.to_finish.message for other in CAUSES if other != cause)
    assert "request r" in caplog.text


def test_every_possible_cause_is_named():
    req = make_request(grammar=Allowing(), logit_bias={"1": 1.0}, presence_penalty=1.0)
    fail_without_choice(req)
    assert_failed(req, HTTPStatus.BAD_REQUEST, "grammar", "logit_bias", "presence_penalty")


@every_kind
@pytest.mark.parametrize("more", [{}, {"logit_bias": {}}, {"top_p": 0.5, "min_p": 0.1}])
def test_other_causes_are_answered_with_500(kind, more):
    req = make_request(**kind, **more)
    fail_without_choice(req)
    assert_failed(req, HTTPStatus.INTERNAL_SERVER_ERROR, "NaN or inf")


# Prefills


def prefilled(reqs, logits):
    rows = [Row(RowKind.PREFILL, 0, 7, torch.tensor([i])) for i in range(len(reqs))]
    return first_tokens(reqs, rows, logits, SpecSampler(0, CPU), Ranks())


@every_kind
def test_a_prefill_fails_only_requests_without_a_choice(kind):
    logits = torch.randn((5, VOCAB), generator=torch.Generator().manual_seed(0))
    logits[1, 2] = NAN
    reqs = [
        make_request("sound", **kind),
        make_request("NaN", **kind),
        make_request("empty", grammar=Allowing(), **kind),
        make_request("constrained", grammar=Allowing(4), **kind),
        make_request("greedy", **GREEDY),
    ]
    first, broken, empty, constrained, greedy = prefilled(reqs, logits)
    assert len(first.tokens) == 1
    assert broken is None
    assert empty is None
    assert constrained.tokens == [4]
    assert greedy.tokens == [int(logits[4].argmax())]
    assert_failed(reqs[1], HTTPStatus.INTERNAL_SERVER_ERROR)
    assert_failed(reqs[2], HTTPStatus.BAD_REQUEST, "grammar")
    assert_goes_on(reqs[0], reqs[3], reqs[4])


def test_a_failing_neighbour_changes_no_sampled_token():
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(0))
    reqs = [make_request(**SAMPLED) for _ in range(3)]
    wanted = prefilled([reqs[0], reqs[2]], logits[[0, 2]])
    logits[1] = NAN
    found = prefilled(reqs, logits)
    assert [found[0].tokens, found[2].tokens] == [each.tokens for each in wanted]


def test_logits_of_a_chunk_that_is_not_the_last_do_not_matter():
    req = make_request(middle_chunks=1, **GREEDY)
    assert prefilled([req], torch.full((1, VOCAB), NAN)) == [None]
    assert_goes_on(req)


# Rounds


@pytest.fixture
def run_round():
    """Run a round of KVSpecWorker in which the engine emits the given entries."""

    def run(reqs, emitted):
        worker = object.__new__(KVSpecWorker)
        worker.config = KVSpecConfig(draft_len=4, stream="burst")
        worker.speculative_num_draft_tokens = 5
        lens = [1 if entry is None else max(len(entry.tokens), 1) for entry in emitted]
        worker.parts = SimpleNamespace(
            arrivals=SimpleNamespace(receive=lambda batch: None),
            table=SimpleNamespace(of_batch=lambda rows, counts: [None] * len(counts)),
        )
        worker.loop = SimpleNamespace(
            run_round=lambda batch: RoundResult(emitted, lens, None, was_captured=False)
        )
        states = [new_state(req, 10, 1) for req in reqs]
        batch = SimpleNamespace(
            reqs=reqs,
            seq_lens=torch.tensor([10] * len(reqs)),
            req_pool_indices=None,
            return_logprob=False,
            spec_info=KVSpecDraftInput(states),
        )
        return worker._run_round(batch)

    return run


@every_kind
def test_a_round_fails_only_requests_without_a_token(kind, run_round):
    reqs = [make_request(rid, **kind) for rid in "abc"]
    result = run_round(reqs, [VerifyResult([2, 3], None), VerifyResult([], None), None])
    assert_failed(reqs[1], HTTPStatus.INTERNAL_SERVER_ERROR)
    assert_goes_on(reqs[0], reqs[2])
    assert result.accept_lens.tolist() == [2, 0, 0]
    assert result.next_token_ids.tolist() == [2, 3, 0, 0, 0, *[0] * 10]


def test_a_round_names_what_the_failed_request_brought(run_round):
    req = make_request(grammar=Allowing(), **GREEDY)
    run_round([req], [VerifyResult([], None)])
    assert_failed(req, HTTPStatus.BAD_REQUEST, "grammar")
