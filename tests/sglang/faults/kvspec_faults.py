"""Breaks KVSpec on purpose, inside a real server, to see that comparisons notice; or gives it the
residual cache of a machine with little memory; or lets requests in for which there is no room.

A server that has this folder on PYTHONPATH loads it as an SGLang plugin. The file named by
KVSPEC_FAULT_FILE lists the active faults, so that one server can show them all. KVSPEC_CACHE_PAGES
is the most pages the residual cache may have, whatever memory there is. KVSPEC_HEADROOM_TOKENS is
what running requests have room to add when another starts.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

_dice = random.Random(0)


def register() -> None:
    """Put every fault in place; each looks up at every call whether it is the active one."""
    if "SGLANG_KVSPEC" not in os.environ:
        return
    if "KVSPEC_CACHE_PAGES" in os.environ:
        _shrink_cache(int(os.environ["KVSPEC_CACHE_PAGES"]))
    if "KVSPEC_HEADROOM_TOKENS" in os.environ:
        _set_headroom(int(os.environ["KVSPEC_HEADROOM_TOKENS"]))
    if "KVSPEC_FAULT_FILE" not in os.environ:
        return
    from sglang_kvspec.kv.prefix_store import MemoryStore, PrefixStore
    from sglang_kvspec.kv.reference_cache import ReferenceKVCache
    from sglang_kvspec.kv.residual_cache import ResidualCache
    from sglang_kvspec.planning import rounds
    from sglang_kvspec.runtime import spec_sampler
    from sglang_kvspec.runtime.disaggregation.arrivals import Arrivals
    from sglang_kvspec.runtime.disaggregation.departures import Departures
    from sglang_kvspec.runtime.ranks import Ranks
    from sglang_kvspec.runtime.remote_prefixes import RemotePrefixes
    from sglang_kvspec.runtime.remote_prefixes.circuit_breaker import CircuitBreaker
    from sglang_kvspec.runtime.request_state import RequestState
    from sglang_kvspec.transport import TokenBucket

    _replace(spec_sampler.SpecSampler, "draft", "bad_drafts", _spoil_every_fifth_draft)
    _replace(spec_sampler.SpecSampler, "draft_top1", "bad_drafts", _spoil_every_fifth_of_all)
    _replace(spec_sampler, "accept_matching", "wrong_verifier", _accept_everything)
    _replace(RequestState, "commit", "skipped_rollback", _commit_without_rollback)
    _replace(ReferenceKVCache, "read_target", "off_by_one_page", _read_the_page_before)
    _replace(ResidualCache, "write", "stale_residual", _write_first_generation_only)
    # Faults of the machine, under which answers stay right or fail.
    _replace(ResidualCache, "finish_fetches", "stalled_copy", _finish_nothing)
    _replace(ResidualCache, "write", "flipped_bit", _flip_a_bit)
    # What the first rank decides must hold on all: the others now decide otherwise.
    _replace(spec_sampler, "adjust_logits", "ranks_differ", _shift_on_other_ranks)
    _replace(spec_sampler, "accept_matching", "ranks_differ", _choose_others_on_other_ranks)
    _replace(rounds, "plan_round", "ranks_differ", _draft_nothing_on_other_ranks)
    # What happens on one rank's link alone.
    _replace(TokenBucket, "__init__", "slow_rank", _send_slowly_from_other_ranks)
    _replace(Arrivals, "is_draftable", "lost_anchors", _lose_one_that_waits_for_anchors)
    _replace(Arrivals, "land_together", "lost_residuals", _lose_one_that_waits_for_residuals)
    _replace(Departures, "send_last", "lost_departure", _give_one_up_at_the_end)
    # What one rank lacks, or loses, must be lacking on all.
    _replace(PrefixStore, "put", "disk_refuses_on_other_ranks", _refuse_on_other_ranks)
    for tier in (PrefixStore, MemoryStore):
        _replace(tier, "put", "tiers_drift", _refuse_some_on_other_ranks)
        _replace(tier, "read_residuals", "tiers_drift", _lose_some_on_other_ranks)
    _replace(RemotePrefixes, "read", "remote_fails_on_other_ranks", _refuse_on_other_ranks)
    _replace(CircuitBreaker, "allows", "other_ranks_distrust", _refuse_on_other_ranks)
    _replace(Ranks, "least", "ranks_do_not_agree", _keep_own_numbers)


def _shrink_cache(num_pages: int) -> None:
    from sglang_kvspec.adapters import pool_sizing

    plan_capacity = pool_sizing.plan_capacity

    def planned(*args: Any, **kwargs: Any) -> Any:
        plan = plan_capacity(*args, **kwargs)
        if not plan.host_pages:
            # There would be nowhere else for the others.
            return plan
        return replace(plan, cache_pages=min(plan.cache_pages, num_pages))

    pool_sizing.plan_capacity = planned


def _set_headroom(num_tokens: int) -> None:
    from sglang_kvspec.adapters import scheduling

    scheduling.Admission = partial(scheduling.Admission, headroom_tokens=num_tokens)


def _replace(owner: Any, name: str, fault: str, faulty: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def either(*args: Any, **kwargs: Any) -> Any:
        active = Path(os.environ["KVSPEC_FAULT_FILE"]).read_text().split()
        return (faulty if fault in active else _sound)(original, *args, **kwargs)

    setattr(owner, name, either)


def _sound(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


def _spoil_every_fifth_draft(original: Any, self: Any, state: Any, *args: Any) -> None:
    """Not a fault of the verifier: sound verification must reject these."""
    original(self, state, *args)
    if len(state.drafts) % 5 == 0:
        state.drafts[-1] = (state.drafts[-1] + 7) % 1000


def _spoil_every_fifth_of_all(original: Any, self: Any, states: Any, *args: Any) -> None:
    """The same for drafts of several requests at once."""
    original(self, states, *args)
    for state in states:
        if len(state.drafts) % 5 == 0:
            state.drafts[-1] = (state.drafts[-1] + 7) % 1000


def _accept_everything(original: Any, drafts: list[int], targets: list[int]) -> list[int]:
    return [*drafts, targets[-1]]


def _commit_without_rollback(original: Any, state: Any, emitted: list[int]) -> None:
    """Rejected drafts stay, as if they followed the new token."""
    rejected = state.drafts[len(emitted) - 1 :]
    original(state, emitted)
    state.pending = rejected[0] if rejected else state.pending


def _read_the_page_before(original: Any, kv: Any, layer: int, pages: torch.Tensor) -> Any:
    return original(kv, layer, torch.cat((pages[:1], pages[:-1])))


def _write_first_generation_only(
    original: Any, tiers: Any, layer: int, pages: torch.Tensor, records: torch.Tensor
) -> None:
    """A reused page keeps the residual of the tokens it held before."""
    fresh = torch.tensor([tiers.table.ref(page).generation == 0 for page in pages.tolist()])
    original(tiers, layer, pages[fresh], records[fresh])


def _finish_nothing(original: Any, tiers: Any) -> None:
    """Copies that have begun do not end."""


def _flip_a_bit(
    original: Any, residuals: Any, layer: int, pages: torch.Tensor, records: torch.Tensor
) -> None:
    """In the store, of the last layer of every page."""
    original(residuals, layer, pages, records)
    store = residuals.store
    if layer == store.num_layers - 1:
        store.layer(layer)[pages, 0, 0] ^= 1


def _is_another_rank() -> bool:
    """Also leaves a sign, beside the file that names the faults, that one fired."""
    if torch.distributed.get_rank() == 0:
        return False
    Path(os.environ["KVSPEC_FAULT_FILE"]).with_suffix(".fired").touch()
    return True


def _shift_on_other_ranks(original: Any, *args: Any) -> torch.Tensor:
    logits: torch.Tensor = original(*args)
    return logits.roll(1, dims=-1) if _is_another_rank() else logits


def _choose_others_on_other_ranks(original: Any, drafts: Any, targets: Any) -> Any:
    if _is_another_rank():
        targets = [(target + 1) % 1000 for target in targets]
    return original(drafts, targets)


def _draft_nothing_on_other_ranks(original: Any, requests: Any, cost: Any) -> list[int]:
    lens: list[int] = original(requests, cost)
    return [0] * len(lens) if _is_another_rank() else lens


def _send_slowly_from_other_ranks(
    original: Any, bucket: Any, bytes_per_s: float, *args: Any
) -> None:
    is_first = torch.distributed.get_rank() == 0
    original(bucket, bytes_per_s if is_first else bytes_per_s / 2, *args)


def _is_another_rank_for_once() -> bool:
    has_fired = Path(os.environ["KVSPEC_FAULT_FILE"]).with_suffix(".fired").exists()
    return not has_fired and _is_another_rank()


def _lose_one_that_waits_for_anchors(original: Any, arrivals: Any, room: int) -> bool:
    if _is_another_rank_for_once():
        arrivals.note_failure(room, "lost on purpose")
    return bool(original(arrivals, room))


def _lose_one_that_waits_for_residuals(original: Any, arrivals: Any, rooms: Any) -> None:
    if rooms and _is_another_rank_for_once():
        arrivals.note_failure(rooms[0], "lost on purpose")
    original(arrivals, rooms)


def _give_one_up_at_the_end(original: Any, departures: Any, room: int, *args: Any) -> None:
    original(departures, room, *args)
    if _is_another_rank_for_once():
        departures.abort(room, "given up on purpose")


def _refuse_on_other_ranks(original: Any, *args: Any) -> bool:
    return not _is_another_rank() and bool(original(*args))


def _refuse_some_on_other_ranks(original: Any, *args: Any) -> bool:
    return not (_is_another_rank() and _dice.random() < 1 / 8) and bool(original(*args))


def _lose_some_on_other_ranks(original: Any, *args: Any) -> list[bool]:
    """As if their checksums were wrong."""
    found: list[bool] = original(*args)
    return [good and _dice.random() < 7 / 8 for good in found] if _is_another_rank() else found


def _keep_own_numbers(original: Any, ranks: Any, mine: Any, about: object) -> list[int]:
    return list(mine)
