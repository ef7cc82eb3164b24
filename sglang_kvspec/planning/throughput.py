"""Expected throughput of drafting and verifying (VeriCache appendix B.1, equations 5 to 11).

The model is VeriCache's: equal requests in steady state draft for x iterations and verify in one
more. Some keep their residuals resident, the others fetch residuals for every verification. Sizes
are KVSpec's: KV_full is anchor + residual, and c KV_full is the anchor. Forward times come from
IterationCosts, so that arithmetic counts beside memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, inf

from sglang_kvspec.core.config import MAX_DRAFT_LEN
from sglang_kvspec.planning.costs import AcceptanceCurve, Costs, IterationCosts
from sglang_kvspec.planning.draft_budget import ALL_PAGES

# Factor by which binding() raises each resource, to find the one that binds.
RELIEF = 1.25


@dataclass(frozen=True, slots=True)
class RequestBytes:
    """KV bytes of one request on one rank. always: its anchors and its recent window. stored: its
    residuals in the host store. The link moves no more."""

    plain: float
    always: float
    residual: float
    stored: float


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that throughput depends on; one rank's share of what ranks divide.

    kv_bytes: HBM left for KV. copies_bytes: what copies of weights for drafts take of it.
    host_bytes: size of the residual store, inf for as much as needed, 0 for none.
    link_bytes_per_s: from host memory to HBM. unpack_s: GPU seconds to unpack the residuals of one
    request, 0 where they come as they are. max_requests: limit of running requests. pages_read:
    share of its pages that a request's drafts read, as costs and curve have it. mass_read: share of
    the attention mass that is on these pages.
    """

    context_len: int
    request: RequestBytes
    costs: IterationCosts
    curve: AcceptanceCurve
    kv_bytes: float
    link_bytes_per_s: float
    host_bytes: float = inf
    copies_bytes: float = 0.0
    unpack_s: float = 0.0
    max_requests: int = 256
    max_draft_len: int = MAX_DRAFT_LEN
    pages_read: float = ALL_PAGES
    mass_read: float = 1.0

    @property
    def plain_requests(self) -> int:
        """Requests whose plain KV fits: the full-KV baseline at the end of appendix B.1."""
        return self._at_most(self.kv_bytes / self.request.plain)

    @property
    def left_bytes(self) -> float:
        """HBM that copies leave to KV."""
        return self.kv_bytes - self.copies_bytes

    @property
    def resident_requests(self) -> int:
        """Requests that fit with all residuals in HBM."""
        return self._at_most(self.left_bytes / (self.request.always + self.request.residual))

    @property
    def most_requests(self) -> int:
        """Requests that fit at all: with residuals in the host store where there is one."""
        if not self.host_bytes:
            return self.resident_requests
        in_store = self._at_most(self.host_bytes / self.request.stored)
        fetching = self._at_most((self.left_bytes - self.request.residual) / self.request.always)
        return min(in_store, max(fetching, self.resident_requests))

    @property
    def plain_seconds(self) -> float:
        """Seconds of one plain decoding iteration of all requests that fit."""
        num = self.plain_requests
        return self.costs.plain_seconds(num, num * self.context_len)

    @property
    def plain_tokens_per_s(self) -> float:
        return self.plain_requests / self.plain_seconds if self.plain_requests else 0.0

    def _at_most(self, num: float) -> int:
        return max(int(min(num, self.max_requests)), 0)


@dataclass(frozen=True, slots=True)
class Cycle:
    """One way to run: draft_len drafts a verification, with num_resident requests whose residuals
    are resident and num_fetching requests whose residuals are fetched.

    gpu_s, link_s: forward and link seconds of an average iteration. cycles_per_load: iterations for
    which one request's residuals are on the link; each load serves one verification.
    """

    draft_len: int
    num_resident: int
    num_fetching: int
    gpu_s: float
    link_s: float
    cycles_per_load: int
    tokens_per_cycle: float

    @property
    def num_requests(self) -> int:
        return self.num_resident + self.num_fetching

    @property
    def iteration_s(self) -> float:
        """Seconds of an average iteration (equation 10): forwards and fetches overlap."""
        return max(self.gpu_s, self.link_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, the objective of equation 11."""
        each = self.tokens_per_cycle / (self.draft_len + 1)
        return self.num_requests * each / self.iteration_s


def average_request_bytes(request: RequestBytes, draft_len: int) -> float:
    """Return the HBM bytes that a fetching request holds on average (equation 5). Its residuals are
    there in one iteration of draft_len + 1."""
    return request.always + request.residual / (draft_len + 1)


def held_bytes(
    request: RequestBytes, num_resident: int, num_fetching: int, draft_len: int
) -> float:
    """Return the left side of equation 6, without the weights.

    If anything is fetched, the result also counts one request's residuals, which are loaded while
    others verify. The HBM ring of section 5.1 holds them from the first byte on, which equation 5
    leaves out.
    """
    resident = num_resident * (request.always + request.residual)
    fetching = num_fetching * average_request_bytes(request, draft_len)
    return resident + fetching + (request.residual if num_fetching else 0.0)


def gpu_seconds(costs: Costs, num_requests: int, context_len: int, draft_len: int) -> float:
    """Return the forward seconds of an average iteration, in place of equation 7. One request in
    draft_len + 1 verifies draft_len + 1 tokens, and the others draft."""
    num_verify = num_requests / (draft_len + 1)
    num_draft = num_requests - num_verify
    return costs.seconds(
        num_draft_rows=num_draft,
        draft_kv_tokens=num_draft * context_len,
        num_verify_rows=num_verify,
        verify_query_tokens=num_verify * (draft_len + 1),
        verify_kv_tokens=num_verify * context_len,
    )


def link_seconds(
    num_fetching: int, stored_bytes: float, draft_len: int, link_bytes_per_s: float
) -> float:
    """Return the link seconds that an average iteration needs, however long a load takes.

    Equation 8 also divides by the cycles per load. But a load that spans several iterations uses
    the link in each of them. All that a cycle of draft_len + 1 iterations fetches has to pass the
    link within the cycle. So that divisor is 1 here.
    """
    return num_fetching * stored_bytes / ((draft_len + 1) * link_bytes_per_s)


def cycles_per_load(stored_bytes: float, link_bytes_per_s: float, iteration_s: float) -> int:
    """Return the iterations that one request's load spans (S_r of section 5.1)."""
    return max(1, ceil(stored_bytes / (link_bytes_per_s * iteration_s)))


def cycle_of(setting: Setting, draft_len: int, num_resident: int, num_fetching: int) -> Cycle:
    """Return the cycle of a draft length and numbers of requests. Memory is not checked."""
    stored, link = setting.request.stored, setting.link_bytes_per_s
    gpu_s = gpu_seconds(setting.costs, num_resident + num_fetching, setting.context_len, draft_len)
    # Each fetching request is unpacked once a cycle.
    gpu_s += num_fetching * setting.unpack_s / (draft_len + 1)
    link_s = link_seconds(num_fetching, stored, draft_len, link)
    span = cycles_per_load(stored, link, max(gpu_s, link_s)) if num_fetching else 0
    tokens = setting.curve.expected_tokens(draft_len)
    return Cycle(draft_len, num_resident, num_fetching, gpu_s, link_s, span, tokens)


def best_cycle(setting: Setting, *, may_fetch: bool = True) -> Cycle | None:
    """Return the cycle with the most tokens a second (equation 11); None when no request fits.

    Of equally fast cycles, the shortest draft length wins, then the fewest fetching requests.
    """
    candidates = (
        cycle_of(setting, draft_len, num_resident, num_fetching)
        for draft_len in range(1, setting.max_draft_len + 1)
        for num_resident, num_fetching in _mixes(setting, draft_len, may_fetch)
    )
    return max(candidates, key=lambda cycle: cycle.tokens_per_s, default=None)


def _mixes(setting: Setting, draft_len: int, may_fetch: bool) -> Iterator[tuple[int, int]]:
    """Yield (num_resident, num_fetching) for each number of fetching requests, with the most
    resident requests that equation 6 allows. One more request never lowers throughput, because an
    iteration has fixed costs."""
    request = setting.request
    limit = setting.max_requests
    fetches = may_fetch and setting.host_bytes > 0
    if fetches:
        # Write-through: the store holds resident residuals, too.
        limit = min(limit, int(min(setting.host_bytes / request.stored, limit)))
    for num_fetching in range(limit + 1 if fetches else 1):
        left = setting.left_bytes - held_bytes(request, 0, num_fetching, draft_len)
        if left < 0:
            return
        fitting = int(left / (request.always + request.residual))
        num_resident = min(fitting, limit - num_fetching)
        if num_resident + num_fetching:
            yield num_resident, num_fetching


@dataclass(frozen=True, slots=True)
class Expectation:
    """Expected throughput of a setting. cycle: None where speculation does not pay and requests
    decode plainly.

    speculative_speed_up: of the best cycle, below 1 where speculation does not pay; 0 where no
    request fits. binds: the resource of which a quarter more would help most.
    """

    setting: Setting
    cycle: Cycle | None
    speculative_speed_up: float
    binds: str

    @property
    def tokens_per_s(self) -> float:
        return self.cycle.tokens_per_s if self.cycle else self.setting.plain_tokens_per_s

    @property
    def speed_up(self) -> float:
        """Speed-up over plain decoding: inf where plain decoding fits no request, 1 where it is
        chosen."""
        if self.cycle is None:
            return 1.0
        plain = self.setting.plain_tokens_per_s
        return self.cycle.tokens_per_s / plain if plain else inf


def expect(setting: Setting, *, may_fetch: bool = True) -> Expectation:
    """Return the best cycle, or plain decoding where that is at least as fast."""
    best, plain = best_cycle(setting, may_fetch=may_fetch), setting.plain_tokens_per_s
    if best is None:
        return Expectation(setting, None, 0.0, binding(setting, 0.0, may_fetch=may_fetch))
    pays = best.tokens_per_s > plain
    speed_up = best.tokens_per_s / plain if plain else inf
    tokens_per_s = max(best.tokens_per_s, plain)
    binds = binding(setting, tokens_per_s, may_fetch=may_fetch)
    return Expectation(setting, best if pays else None, speed_up, binds)


def binding(setting: Setting, tokens_per_s: float, *, may_fetch: bool) -> str:
    """Return the resource of which a quarter more would raise throughput most, plain or not."""
    costs = setting.costs
    relieved = {
        "HBM capacity": replace(setting, kv_bytes=setting.kv_bytes * RELIEF),
        "HBM bandwidth": replace(setting, costs=costs.with_faster(memory=RELIEF)),
        "compute": replace(setting, costs=costs.with_faster(arithmetic=RELIEF)),
    }
    if may_fetch and setting.host_bytes:
        relieved["link"] = replace(setting, link_bytes_per_s=setting.link_bytes_per_s * RELIEF)
        if setting.host_bytes < inf:
            relieved["host memory"] = replace(setting, host_bytes=setting.host_bytes * RELIEF)
    relieved["running requests"] = replace(setting, max_requests=int(setting.max_requests * RELIEF))

    def gain(name: str) -> float:
        better = best_cycle(relieved[name], may_fetch=may_fetch)
        speculative = better.tokens_per_s if better else 0.0
        return max(speculative, relieved[name].plain_tokens_per_s) - tokens_per_s

    gains = {name: gain(name) for name in relieved}
    most = max(gains, key=lambda name: gains[name])
    # If no resource helps, no request fits even with a quarter more, for lack of HBM.
    return most if gains[most] > 0 else "HBM capacity"
