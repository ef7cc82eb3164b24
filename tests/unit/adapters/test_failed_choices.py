"""Requests whose next token cannot be chosen: only they fail, and with the status of the cause."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_kvspec.adapters.compat import runtime_context
from sglang_kvspec.adapters.first_tokens import first_tokens
from sglang_kvspec.adapters.requests import fail_without_choice, new_state
from sglang_kvspec.adapters.verifying_worker import VerifyingWorker
from sglang_kvspec.runtime.chooser import Chooser
from sglang_kvspec.runtime.forward_plan import Row, RowKind
from sglang_kvspec.runtime.ranks import Ranks

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
    return SimpleNamespace(
        rid=rid,
        grammar=grammar,
        inflight_middle_chunks=middle_chunks,
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
def test_what_the_request_brings_is_its_own_fault(cause, caplog):
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
def test_all_else_is_the_fault_of_the_server(kind, more):
    req = make_request(**kind, **more)
    fail_without_choice(req)
    assert_failed(req, HTTPStatus.INTERNAL_SERVER_ERROR, "NaN or inf")


# Prefills


def prefilled(reqs, logits):
    rows = [Row(RowKind.PREFILL, 0, 7, torch.tensor([i])) for i in range(len(reqs))]
    return first_tokens(reqs, rows, logits, Chooser(0, CPU), Ranks())


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


# Verifications


class Worker:
    """The part of a worker that judges verifications."""

    def __init__(self):
        self.chooser, self.ranks, self.decoding = Chooser(0, CPU), Ranks(), None
        self.observed, self.committed = [], []
        self.counters = SimpleNamespace(observe_verification=lambda *n: self.observed.append(n))
        self.pages = SimpleNamespace(commit=lambda *args: self.committed.append(args[1:]))
        self._verify = partial(VerifyingWorker._verify, self)
        self._commit = partial(VerifyingWorker._commit, self)

    def judge(self, reqs, states, logits, return_logprob=False):
        batch = SimpleNamespace(reqs=reqs, return_logprob=return_logprob)
        rows = {
            i: Row(RowKind.VERIFY, state.verified_len, len(state.unverified), torch.tensor([i]))
            for i, state in enumerate(states)
        }
        likeliest = VerifyingWorker._likeliest(batch, states, rows, logits)
        return VerifyingWorker._judge(self, batch, states, rows, logits, likeliest)


NUM_DRAFTS = 3


def make_states(reqs):
    """Requests that have drafted token 2 each time."""
    states = [new_state(req, 10, 1) for req in reqs]
    for state in states:
        state.drafts = [2] * NUM_DRAFTS
        state.draft_probs = [torch.eye(VOCAB)[2]] * NUM_DRAFTS
    return states


def make_logits(num_requests):
    """The target chooses token 2, whichever way."""
    logits = torch.zeros((num_requests * (NUM_DRAFTS + 1), VOCAB))
    logits[:, 2] = 200.0
    return logits


@every_kind
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("with_greedy", [True, False])
def test_a_verification_fails_only_a_request_whose_first_row_is_unsound(kind, bad, with_greedy):
    neighbour = GREEDY if with_greedy else SAMPLED
    reqs = [make_request("a", **neighbour), make_request("b", **kind), make_request("c", **kind)]
    states, worker = make_states(reqs), Worker()
    logits = make_logits(3)
    logits[NUM_DRAFTS + 1, 0] = bad
    verified = worker.judge(reqs, states, logits)
    assert verified[1] is None
    assert_failed(reqs[1], HTTPStatus.INTERNAL_SERVER_ERROR)
    for i in (0, 2):
        assert verified[i].tokens == [2] * (NUM_DRAFTS + 1)
        assert states[i].committed_len == 10 + NUM_DRAFTS + 1
    assert_goes_on(reqs[0], reqs[2])
    # Nothing of the request that failed is counted, or kept in pages.
    assert worker.observed == [(NUM_DRAFTS, NUM_DRAFTS)] * 2
    assert worker.committed == [(10, 10 + NUM_DRAFTS + 1)] * 2
    assert states[1].committed_len == 10


@every_kind
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("return_logprob", [True, False])
def test_a_verification_emits_what_comes_before_an_unsound_row(kind, at, return_logprob):
    reqs = [make_request("a", **kind), make_request("b", **kind)]
    states, worker = make_states(reqs), Worker()
    logits = make_logits(2)
    logits[at, 5] = NAN
    verified = worker.judge(reqs, states, logits, return_logprob)
    assert verified[0].tokens == [2] * at
    assert verified[1].tokens == [2] * (NUM_DRAFTS + 1)
    assert_goes_on(*reqs)
    # The next verification begins at the unsound row.
    states[0].drafts = [2]
    states[0].draft_probs = [torch.eye(VOCAB)[2]]
    worker.judge(reqs[:1], states[:1], logits[at : at + 2].clone())
    assert_failed(reqs[0], HTTPStatus.INTERNAL_SERVER_ERROR)


@every_kind
def test_a_verification_fails_a_request_whose_grammar_allows_nothing(kind):
    reqs = [make_request("a", grammar=Allowing(), **kind), make_request("b", **GREEDY)]
    states, worker = make_states(reqs), Worker()
    verified = worker.judge(reqs, states, make_logits(2))
    assert verified[0] is None
    assert verified[1].tokens == [2] * (NUM_DRAFTS + 1)
    assert_failed(reqs[0], HTTPStatus.BAD_REQUEST, "grammar")
    assert_goes_on(reqs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_logits_reach_the_cpu_with_all_their_bits(dtype):
    """Largest logits travel as integers, so that one transfer brings them with the tokens."""
    logits = make_logits(1).to(dtype)
    logits[0], logits[1, 4], logits[2, 0] = -float("inf"), NAN, float("inf")
    req = make_request(**GREEDY)
    (state,) = make_states([req])
    rows = {0: Row(RowKind.VERIFY, 10, NUM_DRAFTS + 1, torch.tensor([0]))}
    batch = SimpleNamespace(reqs=[req])
    tokens, bits = VerifyingWorker._likeliest(batch, [state], rows, logits)
    assert tokens.dtype == bits.dtype == torch.int64
    largest = bits.view(torch.float64).tolist()
    assert largest[0] == -float("inf")
    assert largest[1] != largest[1]
    assert largest[2:] == [float("inf"), 200.0]
    assert tokens[3] == 2
