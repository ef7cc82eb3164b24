"""Protocols of everything that the engine is given, for adapters and tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from sglang_kvspec.core.config import MOST_AUTO_DRAFTS, KVSpecConfig
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.residual_planner import ResidualPlanner
from sglang_kvspec.engine.schedule import RoundSchedule
from sglang_kvspec.kv.forward_plan import Row
from sglang_kvspec.planning.draft_length import DraftCost
from sglang_kvspec.planning.link_rounds import LinkShare
from sglang_kvspec.planning.round_cost_model import RoundCostModel
from sglang_kvspec.runtime.draft_view import DraftReads
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.request_state import RequestState


class ModelForward(Protocol):
    """The model over rows of any lengths, without sampling."""

    def run(
        self, batch: RoundBatch, rows: Mapping[int, Row], made: DraftedTokens | None = None
    ) -> torch.Tensor:
        """Run the rows, which are by index of the request, and write their KV. Return the logits
        [num_tokens, vocab] of all their tokens. made: drafts that only the device knows."""


class VerifyLogits(NamedTuple):
    """Logits of a verification. logits: of the verified rows, [num_tokens, vocab]. draft_logits: of
    piggyback drafts, [num_drafts, vocab]. drafted: most likely tokens of these drafts. Both are
    None without piggyback drafts. The next forward may overwrite all of these tensors."""

    logits: torch.Tensor
    draft_logits: torch.Tensor | None = None
    drafted: DraftedTokens | None = None


class CapturedVerify(Protocol):
    """Verifications that a device replays as CUDA graphs."""

    def run(
        self,
        batch: RoundBatch,
        rows: Mapping[int, Row],
        made: DraftedTokens | None,
        piggyback: Mapping[int, Row],
    ) -> VerifyLogits | None:
        """Run VERIFY rows, and DRAFT rows of other requests in the same forward. Do nothing and
        return None where no capture has room."""


class Drafter(Protocol):
    """Proposer of tokens. Registered in the entry-point group `sglang_kvspec.drafters` as a class
    whose constructor takes the server's KVSpecConfig and the vocabulary's size."""

    def draft(self, batch: RoundBatch, lens: Sequence[int]) -> DraftedTokens | None:
        """Make up to lens[i] drafts for request i, behind the drafts that it has.

        Append the drafts to `drafts` of its state. Or return them if only the device knows them:
        exactly lens[i] each. A request that is sampled without a seed needs in `draft_probs` the
        distribution [vocab] that each draft was drawn from. All ranks must make the same drafts.
        """


class WideLogits(NamedTuple):
    """Logits of a draft step with several tokens of a request. logits: [any, vocab]; the next
    forward may overwrite them. top1: most likely token of each row of `logits`. firsts: row of each
    request's last token; the rows of its proposed tokens follow."""

    logits: torch.Tensor
    top1: Sequence[int]
    firsts: Mapping[int, int]


class WideSteps(Protocol):
    """Draft steps over a request's last token and proposed tokens, of which the CPU waits for each
    one."""

    def begin(self, batch: RoundBatch, lens: Sequence[int]) -> None:
        """Prepare steps that make lens[i] drafts for request i, behind the drafts that it has. Any
        other forward ends these steps."""

    def most_proposed(self, state: RequestState, num_requests: int) -> int:
        """Return how many tokens can be proposed to a request in a step, where begin() is given
        drafts of num_requests requests."""

    def run(self, batch: RoundBatch, proposed: Mapping[int, Sequence[int]]) -> WideLogits:
        """Run the last token and the proposed tokens of each request in `proposed`, and write their
        KV."""


class PromptReader(Protocol):
    """Forward that lets a request draft before the last tokens of its prompt have KV."""

    def read_prompt_end(self, batch: RoundBatch) -> torch.Tensor:
        """Compute KV that drafts may read, for the tail of the prompt of the batch's only request.
        Return the logits [1, vocab] of its first draft."""


class PlainSteps(Protocol):
    """Plain steps: tokens at the target precision, without drafts."""

    def advance(
        self, batch: RoundBatch, max_steps: int, skipped: Collection[int]
    ) -> tuple[DraftedTokens, torch.Tensor]:
        """Take up to max_steps greedy tokens for every request that is not skipped. Return the
        tokens, and the logits of the last step in the order of the tokens."""

    def advance_on(self, made: DraftedTokens, steps: int) -> DraftedTokens:
        """Take `steps` more tokens for the same requests, before the CPU has seen `made`."""


class PageGuard(Protocol):
    """Guard of requests against pages that the residual store has corrupted."""

    def drop(self, batch: RoundBatch, rows: dict[int, Row]) -> None:
        """Remove the rows that would read such pages from `rows`, and fail their requests."""


class Arrivals(Protocol):
    """Residuals that are on their way from another server."""

    @property
    def may_be_pending(self) -> bool:
        """Return True if residuals of any request can be on the network."""

    @property
    def come_with_requests(self) -> bool:
        """Return True if every request comes from another server, and its residuals follow."""

    def receive(self, batch: RoundBatch) -> None:
        """Take over residuals that have arrived. Fail requests whose residuals will not come."""

    def is_pending(self, state: RequestState) -> bool:
        """Return True if residuals of a request are still on the network."""

    def note_drafts(
        self, batch: RoundBatch, index: int, ages_s: Sequence[float], *, on_anchors: bool
    ) -> None:
        """Note drafts of request `index`. ages_s: seconds since each draft was made, the oldest
        first. on_anchors: the request lacked residuals when the drafts were begun."""

    def note_verification(self, state: RequestState, num_emitted: int) -> None:
        """Note that a verification, or a step without drafts, emitted num_emitted tokens."""

    def wait(self) -> None:
        """Wait until residuals arrive: no request can go on before."""


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """Everything that a VerifyScheduler is built from, on one rank.

    round_costs: expected seconds of a round, from measured rounds. planner: tells what the link can
    move, and has the measured speeds. ranks: broadcasts rank 0's numbers. draft_cost: cost of a
    draft row, by the bytes that it reads. plain_steps: most tokens that a round without drafts
    takes at once, 0 where every token is verified. stream_round_s: most seconds that a round should
    take while a client reads a stream, None for no limit. reads: tokens that drafts read.
    most_auto_drafts: most drafts of a request with draft_len auto, where no residual is fetched.
    """

    config: KVSpecConfig
    round_costs: RoundCostModel
    planner: ResidualPlanner
    ranks: Ranks
    draft_cost: DraftCost
    plain_steps: int = 0
    stream_round_s: float | None = None
    reads: DraftReads = field(default_factory=DraftReads)
    most_auto_drafts: int = MOST_AUTO_DRAFTS


class VerifyScheduler(Protocol):
    """Policy of how far requests draft, and which verify. Registered in the entry-point group
    `sglang_kvspec.verify_schedulers` as a class whose constructor takes SchedulerParts.

    A scheduler changes neither states nor the plans of `planner`. Every request that can verify
    must do so within a bounded number of rounds. A drafter other than `self` does not piggyback: it
    drafts only what a schedule's `lens` or `alone` ask for.
    """

    # True if requests whose drafts are sampled may piggyback.
    piggybacks_sampled: bool

    def plan(
        self,
        states: Sequence[RequestState],
        late: Collection[int] = (),
        num_drafts: Sequence[int] | None = None,
    ) -> RoundSchedule:
        """Plan a round, the same on every rank. late: requests that cannot verify. num_drafts:
        drafts that each request has when the round begins; by default, the drafts that it has now.

        No request may get more drafts than cap_len(config.max_draft_len) of its state. Ranks
        measure different times, so all numbers that follow from times go through `ranks.numbers()`.
        """

    def piggybacks(self, state: RequestState, num_drafts: int) -> bool:
        """Return True if a request with num_drafts drafts, which does not verify in this round, is
        to piggyback one more draft."""

    def seconds_to_next(
        self, states: Sequence[RequestState], schedule: RoundSchedule | None
    ) -> list[float]:
        """Return the expected seconds until each request emits its next tokens. Every request has
        just emitted some. schedule: of the next round, None where that is not planned yet."""

    @property
    def link_share(self) -> LinkShare | None:
        """Speed that the link allows requests of the last round; None where nothing moves."""
