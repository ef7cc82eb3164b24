"""What the engine asks of a model and of a server: protocols for adapters and tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.residual_planner import ResidualPlanner
from sglang_kvspec.engine.schedule import RoundSchedule
from sglang_kvspec.kv.forward_plan import Row
from sglang_kvspec.planning.draft_length import DraftCost
from sglang_kvspec.planning.link_rounds import LinkShare
from sglang_kvspec.planning.round_cost_model import RoundCostModel
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.request_state import RequestState


class ModelForward(Protocol):
    """The model over rows of any lengths, without sampling."""

    def run(
        self, batch: RoundBatch, rows: Mapping[int, Row], made: DraftedTokens | None = None
    ) -> torch.Tensor:
        """Return logits [num_tokens, vocab] of every token of the rows, which are by index of the
        request. Writes their KV. made: drafts that only the device knows."""


class VerifyLogits(NamedTuple):
    """logits [num_tokens, vocab] of the verified rows. draft_logits [num_drafts, vocab] of
    piggyback drafts, and `drafted`, their most likely tokens; None where there are none. The next
    forward may overwrite all of them."""

    logits: torch.Tensor
    draft_logits: torch.Tensor | None = None
    drafted: DraftedTokens | None = None


class CapturedVerify(Protocol):
    """Verifications that a device replays."""

    def run(
        self,
        batch: RoundBatch,
        rows: Mapping[int, Row],
        made: DraftedTokens | None,
        piggyback: Mapping[int, Row],
    ) -> VerifyLogits | None:
        """Run VERIFY rows, and DRAFT rows of other requests in the same forward. None, and nothing
        was done, where no capture has room."""


class Drafter(Protocol):
    """Proposes tokens. Registered in the entry-point group `sglang_kvspec.drafters` as a class
    whose constructor takes the server's KVSpecConfig and the vocabulary's size."""

    def draft(self, batch: RoundBatch, lens: Sequence[int]) -> DraftedTokens | None:
        """Make up to lens[i] drafts for request i, behind those it has.

        Append them to `drafts` of its state; or return them where only the device knows them, as
        many as asked for. A request that is sampled without a seed needs in `draft_probs` the
        distribution [vocab] that each draft was drawn from. Ranks must make the same drafts.
        """


class PromptReader(Protocol):
    """Lets a request draft whose prompt's last tokens have no KV yet."""

    def read_prompt_end(self, batch: RoundBatch) -> torch.Tensor:
        """Give the tail of the prompt of the batch's only request KV that drafts may read. Return
        the logits [1, vocab] of its first draft."""


class PlainSteps(Protocol):
    """Tokens at the target precision, step by step, without drafts."""

    def advance(
        self, batch: RoundBatch, max_steps: int, skipped: Collection[int]
    ) -> tuple[DraftedTokens, torch.Tensor]:
        """Let every request take up to max_steps tokens, each the most likely one, but for those
        that are skipped. Return the tokens, and the logits of the last step in their order."""

    def advance_on(self, made: DraftedTokens, steps: int) -> DraftedTokens:
        """Let the same requests take so many tokens more, before the CPU has seen `made`."""


class PageGuard(Protocol):
    """Keeps requests from reading pages that the residual store has corrupted."""

    def drop(self, batch: RoundBatch, rows: dict[int, Row]) -> None:
        """Take the rows that would read such pages out of `rows`. Fail their requests."""


class Arrivals(Protocol):
    """Residuals that are on their way from another server."""

    @property
    def may_lack(self) -> bool:
        """Whether residuals of any request can be on the network."""

    @property
    def come_with_requests(self) -> bool:
        """Whether every request comes from another server, with residuals behind it."""

    def receive(self, batch: RoundBatch) -> None:
        """Let what has arrived land. Fail requests whose residuals will not come."""

    def is_lacking(self, state: RequestState) -> bool:
        """Whether residuals of a request are still on the network."""

    def note_drafts(
        self, batch: RoundBatch, index: int, ages_s: Sequence[float], *, on_anchors: bool
    ) -> None:
        """Request `index` has made a draft so many seconds ago, each, the oldest first.
        on_anchors: it was lacking residuals when they were begun."""

    def note_verification(self, state: RequestState, num_emitted: int) -> None:
        """A verification, or a step without drafts, emitted so many tokens."""

    def wait(self) -> None:
        """Wait for something to arrive: no request can go on before."""


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """Everything that a VerifyScheduler is built from, on one rank.

    round_costs: seconds of a round, by those that were measured. planner: what the link can move,
    and the speeds that were measured. ranks: agree on numbers that were measured. draft_cost: cost
    of a draft row, by the bytes that it reads. plain_steps: most tokens that a round without drafts
    takes at once, 0 where every token is verified. stream_round_s: seconds that a round should take
    at most while a client reads a stream, None for no limit.
    """

    config: KVSpecConfig
    round_costs: RoundCostModel
    planner: ResidualPlanner
    ranks: Ranks
    draft_cost: DraftCost
    plain_steps: int = 0
    stream_round_s: float | None = None


class VerifyScheduler(Protocol):
    """Decides which requests draft how far, and which verify. Registered in the entry-point group
    `sglang_kvspec.verify_schedulers` as a class whose constructor takes SchedulerParts.

    Leaves states and the plans of `planner` as they are. Lets every request that can verify do so
    within a bounded number of rounds. A drafter other than `self` does not piggyback: it drafts
    only what a schedule's `lens` or `alone` ask for.
    """

    # Whether requests whose drafts are sampled may piggyback.
    piggybacks_sampled: bool

    def plan(
        self,
        states: Sequence[RequestState],
        late: Collection[int] = (),
        num_drafts: Sequence[int] | None = None,
    ) -> RoundSchedule:
        """Plan a round, the same on every rank. late: requests that cannot verify. num_drafts:
        drafts that each request has when the round begins, those it has now unless given.

        No request may get more drafts than cap_len(config.max_draft_len) of its state. Ranks
        measure different times: what follows from them goes through `ranks.numbers()`.
        """

    def piggybacks(self, state: RequestState, num_drafts: int) -> bool:
        """Whether a request that has so many drafts, and does not verify in this round, is to draft
        once more in the forward in which others verify."""

    def seconds_to_next(
        self, states: Sequence[RequestState], schedule: RoundSchedule | None
    ) -> list[float]:
        """Seconds until each request, which has just emitted tokens, is expected to emit the next
        ones. schedule: of the next round, None where that is not planned yet."""

    @property
    def link_share(self) -> LinkShare | None:
        """What the link lets the requests of the last round reach; None where nothing moves."""
