"""Treatment of KV that is still on its way, by the worker of a decode server."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from sglang_kvspec.adapters.compat.disaggregation import FAKE_BOOTSTRAP_HOST
from sglang_kvspec.adapters.compat.request_kv import kv_of
from sglang_kvspec.adapters.requests import fail, resumed_state
from sglang_kvspec.adapters.spec_inputs import KVSpecDraftInput
from sglang_kvspec.adapters.transfer.peers import Serving, serving
from sglang_kvspec.runtime.disaggregation.arrivals import ON_ANOTHER_RANK, Arrivals
from sglang_kvspec.runtime.disaggregation.retracted_kv import RetractedKV
from sglang_kvspec.runtime.disaggregation.timeline import TRANSFER_CARRIER
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.request_state import RequestState

logger = logging.getLogger(__name__)

# Seconds that an iteration waits for arrivals while no request can continue. New requests of users
# wait that long, too.
NEWS_WAIT_S = 0.005


class Decoding:
    """Landing of KV, and counting of drafts, beside the iterations of a decode server's worker."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        # Drafts that were begun while residuals of their requests were on their way.
        self.drafts_on_anchors = 0

    @property
    def _arrivals(self) -> Arrivals:
        arrivals: Arrivals = self._serving.manager.arrivals
        return arrivals

    def receive(self, reqs: Sequence[Any]) -> None:
        """Land what has arrived, the same on all ranks, and fail requests whose residuals will not
        come."""
        self._serving.manager.pump()
        arrivals = self._arrivals
        # Only late requests: all ranks know already, and alike, which requests are complete.
        rooms = [req.bootstrap_room for req in reqs if arrivals.is_pending(req.bootstrap_room)]
        arrivals.land_together(rooms)
        for req in reqs:
            reason = arrivals.failure(req.bootstrap_room)
            if reason is not None and req.to_finish is None:
                message = (
                    "KV of the request could not be received, so its tokens cannot be verified: "
                    f"{reason}"
                )
                logger.error("%s (request %s)", message, req.rid)
                fail(req, message)

    def wait(self) -> None:
        """Wait for news of a link, NEWS_WAIT_S at most: no request can continue without."""
        self._serving.wait_for_news(NEWS_WAIT_S)

    def is_pending(self, state: RequestState) -> bool:
        """Return True if residuals of a request are still on their way."""
        return state.room is not None and self._arrivals.is_pending(state.room)

    def note_drafts(
        self, state: RequestState, ages_s: Sequence[float] = (0.0,), *, on_anchors: bool
    ) -> None:
        """Note drafts of a request. ages_s: seconds since each was made, the oldest draft first.
        on_anchors: is_pending() held when they were begun."""
        if state.timeline is not None:
            now = time.time()
            for age_s in ages_s:
                state.timeline.note_draft(now - age_s)
        self.drafts_on_anchors += len(ages_s) * on_anchors

    def note_verification(self, state: RequestState, num_emitted: int) -> None:
        timeline, now = state.timeline, time.time()
        if timeline is None:
            return
        if not timeline.is_told:
            assert state.room is not None
            timeline.tell(now, num_emitted, self._arrivals.summary(state.room))
        timeline.note_verification(now, num_emitted)


def admit(batch: Any) -> KVSpecDraftInput:
    """Return the states of requests that SGLang adds to the running batch. Fails those that must
    not run. Raises CapacityError if the recent window is full."""
    arrivals: Arrivals = serving().manager.arrivals
    # Wait for running rounds: a request that has left may still draft in a tail's window slot.
    serving().join_rounds()
    page_size = batch.token_to_kv_pool_allocator.page_size
    wrongs = [why_not(req, arrivals, page_size) for req in batch.reqs]
    wrongs = shared_refusals(serving().ranks, batch.reqs, wrongs)
    states = []
    for req, committed_len, wrong in zip(
        batch.reqs, batch.seq_lens_cpu.tolist(), wrongs, strict=True
    ):
        if wrong is not None:
            logger.error("%s (request %s)", wrong, req.rid)
            fail(req, wrong)
        state = resumed_state(req, committed_len)
        last_slot = batch.req_to_token_pool.req_to_token[kv_of(req).req_pool_idx, committed_len - 1]
        state.room = req.bootstrap_room
        state.timeline = arrivals.admit(req.bootstrap_room, int(last_slot) // page_size)
        if state.timeline is not None:
            # SGLang sends users the entries of the tokens that it sends them.
            req.customized_info = {
                "kvspec_token_s": state.timeline.token_s,
                TRANSFER_CARRIER: state.timeline.summaries,
            }
        states.append(state)
    return KVSpecDraftInput(states)


def why_not(req: Any, arrivals: Arrivals, page_size: int) -> str | None:
    """Return why a request must not run; None if it may.

    SGLang's warm-up sends a few tokens with FAKE_BOOTSTRAP_HOST. No KV comes for them, and their
    answers mean nothing. Any client that names this host gets such an answer.
    """
    if req.bootstrap_host != FAKE_BOOTSTRAP_HOST:
        if (failure := arrivals.failure(req.bootstrap_room)) is not None:
            return f"KV of the request could not be received: {failure}"
        return arrivals.wrong_prompt(req.bootstrap_room, req.origin_input_ids)
    if len(req.origin_input_ids) < page_size:
        return None
    return (
        f"bootstrap_host {FAKE_BOOTSTRAP_HOST} is only for warm-ups of up to {page_size - 1} tokens"
    )


def shared_refusals(
    ranks: Ranks, reqs: Sequence[Any], wrongs: Sequence[str | None]
) -> list[str | None]:
    """Return why requests that are about to run must not, by what any rank knows; None for each
    that may. Its first token is the same on all ranks. wrongs: by what this rank knows."""
    if ranks.size == 1 or not reqs:
        return list(wrongs)
    tokens = [req.output_ids[-1] for req in reqs]
    mine = [*(wrong is None for wrong in wrongs), *tokens, *(-token for token in tokens)]
    common = ranks.least([int(value) for value in mine], about=[req.rid for req in reqs])
    are_right, least, most = (common[i * len(reqs) : (i + 1) * len(reqs)] for i in range(3))
    found = []
    for wrong, is_right, low, high in zip(wrongs, are_right, least, most, strict=True):
        if wrong is None and not is_right:
            wrong = ON_ANOTHER_RANK
        elif wrong is None and low != -high:
            wrong = "the ranks of the prefill server sent different first tokens"
        found.append(wrong)
    return found


def keep_retracted(pages: list[int], num_tokens: int) -> RetractedKV:
    """Keep the KV of a request that is retracted."""
    here = serving()
    return RetractedKV(here.kv, here.manager.arrivals, pages, num_tokens)


def wait_when_idle(scheduler: Any) -> None:
    """Wait for news of a link while no batch runs. Do nothing on a fully idle server: SGLang itself
    sleeps there."""
    if scheduler.server_args.disaggregation_mode != "null" and not scheduler.is_fully_idle():
        serving().wait_for_news(NEWS_WAIT_S)
