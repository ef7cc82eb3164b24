"""Plugin that breaks KVSpec on purpose inside a real server, to show that comparisons notice. It
can also shrink the residual cache, as on a machine with little memory, or admit requests without
room.

A server that has this folder on PYTHONPATH loads it as an SGLang plugin. The file named by
KVSPEC_FAULT_FILE lists the active faults, so that one server can show all of them.
KVSPEC_CACHE_PAGES limits the pages of the residual cache, and KVSPEC_ANCHOR_PAGES those that have
anchors. KVSPEC_HEADROOM_TOKENS is the number of
tokens that each running request must have room for when another request starts.
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
    """Put every fault in place. Each call of a faulty function looks up whether its fault is
    active."""
    if "SGLANG_KVSPEC" not in os.environ:
        return
    if "KVSPEC_CACHE_PAGES" in os.environ:
        _change_plan(partial(_shrink_cache, int(os.environ["KVSPEC_CACHE_PAGES"])))
    if "KVSPEC_ANCHOR_PAGES" in os.environ:
        _change_plan(partial(_take_anchors, int(os.environ["KVSPEC_ANCHOR_PAGES"])))
    if "KVSPEC_HEADROOM_TOKENS" in os.environ:
        _set_headroom(int(os.environ["KVSPEC_HEADROOM_TOKENS"]))
    if "KVSPEC_FAULT_FILE" not in os.environ:
        return
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

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
    # Faults of the machine: under them answers stay right or fail.
    _replace(ResidualCache, "finish_fetches", "stalled_copy", _finish_nothing)
    _replace(ResidualCache, "write", "flipped_bit", _flip_a_bit)
    _replace(SchedulerRequestReceiver, "recv_requests", "late_to_receive", _receive_late)
    # All ranks must use what the first rank decides: here the other ranks decide otherwise.
    _replace(spec_sampler, "adjust_logits", "ranks_differ", _shift_on_other_ranks)
    _replace(spec_sampler, "accept_matching", "ranks_differ", _choose_others_on_other_ranks)
    _replace(rounds, "plan_round", "ranks_differ", _draft_nothing_on_other_ranks)
    # Faults on the link of one rank alone.
    _replace(TokenBucket, "__init__", "slow_rank", _send_slowly_from_other_ranks)
    _replace(Arrivals, "is_draftable", "lost_anchors", _lose_one_that_waits_for_anchors)
    _replace(Arrivals, "land_together", "lost_residuals", _lose_one_that_waits_for_residuals)
    _replace(Departures, "send_last", "lost_departure", _give_one_up_at_the_end)
    # A page that one rank lacks, or loses, must count as missing on all ranks.
    _replace(PrefixStore, "put", "disk_refuses_on_other_ranks", _refuse_on_other_ranks)
    for tier in (PrefixStore, MemoryStore):
        _replace(tier, "put", "tiers_drift", _refuse_some_on_other_ranks)
        _replace(tier, "read_residuals", "tiers_drift", _lose_some_on_other_ranks)
    _replace(RemotePrefixes, "read", "remote_fails_on_other_ranks", _refuse_on_other_ranks)
    _replace(CircuitBreaker, "allows", "other_ranks_distrust", _refuse_on_other_ranks)
    _replace(Ranks, "least", "ranks_do_not_agree", _keep_own_numbers)
    if torch.cuda.is_available():
        # Not imported elsewhere: Triton would be loaded.
        from kvspec_kernels.ops import products

        _replace(products, "product", "sums_by_rows", _add_parts_of_few_rows)


def _change_plan(change: Callable[[Any], Any]) -> None:
    from sglang_kvspec.adapters import pool_sizing

    plan_capacity = pool_sizing.plan_capacity
    pool_sizing.plan_capacity = lambda *args, **kwargs: change(plan_capacity(*args, **kwargs))


def _shrink_cache(num_pages: int, plan: Any) -> Any:
    if not plan.host_pages:
        # Without a store the residuals beyond the cache would have no place.
        return plan
    return replace(plan, cache_pages=min(plan.cache_pages, num_pages))


def _take_anchors(num_pages: int, plan: Any) -> Any:
    return replace(plan, pages_without_anchors=max(plan.num_pages - num_pages, 0))


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
    """Change every fifth draft. This is no fault of the verifier, which must reject these
    drafts."""
    original(self, state, *args)
    if len(state.drafts) % 5 == 0:
        state.drafts[-1] = (state.drafts[-1] + 7) % 1000


def _spoil_every_fifth_of_all(original: Any, self: Any, states: Any, *args: Any) -> None:
    """Change every fifth draft of several requests at once."""
    original(self, states, *args)
    for state in states:
        if len(state.drafts) % 5 == 0:
            state.drafts[-1] = (state.drafts[-1] + 7) % 1000


def _accept_everything(original: Any, drafts: list[int], targets: list[int]) -> list[int]:
    return [*drafts, targets[-1]]


def _commit_without_rollback(original: Any, state: Any, emitted: list[int]) -> None:
    """Keep rejected drafts, as if they followed the new token."""
    rejected = state.drafts[len(emitted) - 1 :]
    original(state, emitted)
    state.pending = rejected[0] if rejected else state.pending


def _read_the_page_before(original: Any, kv: Any, layer: int, pages: torch.Tensor) -> Any:
    return original(kv, layer, torch.cat((pages[:1], pages[:-1])))


def _write_first_generation_only(
    original: Any, tiers: Any, layer: int, pages: torch.Tensor, records: torch.Tensor
) -> None:
    """Keep the residual of a page's former tokens when the page is reused."""
    fresh = torch.tensor([tiers.table.ref(page).generation == 0 for page in pages.tolist()])
    original(tiers, layer, pages[fresh], records[fresh])


def _finish_nothing(original: Any, tiers: Any) -> None:
    """Never finish the copies that have begun."""


def _flip_a_bit(
    original: Any, residuals: Any, layer: int, pages: torch.Tensor, records: torch.Tensor
) -> None:
    """Flip a bit of the last layer of every page in the store."""
    original(residuals, layer, pages, records)
    store = residuals.store
    if layer == store.num_layers - 1:
        store.layer(layer)[pages, 0, 0] ^= 1


def _receive_late(original: Any, receiver: Any, *args: Any, **kwargs: Any) -> Any:
    """Once requests have been answered, wait for the next message before anything else is done: the
    scheduler of a busy machine, and a client that sends at once."""
    batch = receiver.get_last_batch()
    if batch is not None and batch.reqs and all(req.finished() for req in batch.reqs):
        receiver.recv_from_tokenizer.poll()
    return original(receiver, *args, **kwargs)


def _is_another_rank() -> bool:
    """Return whether this rank is not the first. If so, create a file beside the fault file, as a
    sign that a fault fired."""
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
    """Report some residuals as lost on other ranks, as if their checksums were wrong."""
    found: list[bool] = original(*args)
    return [good and _dice.random() < 7 / 8 for good in found] if _is_another_rank() else found


def _keep_own_numbers(original: Any, ranks: Any, mine: Any, about: object) -> list[int]:
    return list(mine)


def _add_parts_of_few_rows(
    original: Any, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Add eight parts of a sum last, for as many rows as one request verifies, but not for those of
    many requests. All parts are products of the kernel that is replaced."""
    if not 1 < len(a) < 64:
        return original(a, weight, bias)  # type: ignore[no-any-return]
    parts = zip(a.chunk(8, dim=1), weight.chunk(8, dim=1), strict=True)
    found: torch.Tensor = sum(original(x.contiguous(), y.contiguous(), None) for x, y in parts)
    return found if bias is None else found + bias
