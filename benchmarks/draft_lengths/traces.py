"""Drafts of recorded requests, from every token of their answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from acceptance.confidence import MOST, read_digits

# Names of how sure a draft was: the log-odds of its token, and its lead over the second token.
SIGNALS = ("top", "lead")


@dataclass(frozen=True, slots=True)
class Trace:
    """Drafts of one request. accepted: accept length of draft_len drafts, by the token before them.
    signals: by one of SIGNALS and by token, whole numbers from 0 to 99 that say how sure each draft
    was."""

    draft_len: int
    accepted: Sequence[int]
    signals: Mapping[str, Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft behind drafts that were all accepted. place: number of drafts before it."""

    signal: int
    is_accepted: bool
    place: int


def traces_of(record: Mapping[str, Any]) -> list[Trace]:
    """Return the traces in a result of bench_views.py --at-every-token with a single view."""
    settings = record["settings"]
    if not settings.get("at_every_token") or len(settings["raw"]) != 1:
        raise ValueError(
            "draft lengths are simulated from results of bench_views.py --at-every-token with one "
            f"view, got the views {', '.join(settings['raw'])}"
        )
    (requests,) = settings["raw"].values()
    return [
        Trace(
            settings["draft_len"],
            each["accepted"],
            {name: [read_digits(digits) for digits in each[name]] for name in SIGNALS},
        )
        for each in requests
    ]


def drafts_of(traces: Sequence[Trace], signal: str) -> Iterator[Draft]:
    """Yield every draft up to the first rejected one, behind each token."""
    for trace in traces:
        for accepted, sure in zip(trace.accepted, trace.signals[signal], strict=True):
            for place in range(min(accepted + 1, trace.draft_len)):
                yield Draft(sure[place], place < accepted, place)


def chances(traces: Sequence[Trace], signal: str) -> list[float]:
    """Return the chance that a draft is accepted if all before it are, by its signal 0 to 99.

    Chances never fall where the signal rises: neighbours that would make them fall share their
    mean. Each signal begins with one draft at the mean chance.
    """
    counts, kept = [0.0] * (MOST + 1), [0.0] * (MOST + 1)
    for draft in drafts_of(traces, signal):
        counts[draft.signal] += 1
        kept[draft.signal] += draft.is_accepted
    mean = (sum(kept) + 1) / (sum(counts) + 1)
    pools: list[tuple[float, float, int]] = []
    for count, good in zip(counts, kept, strict=True):
        pool = (count + 1, good + mean, 1)
        while pools and pools[-1][1] * pool[0] >= pool[1] * pools[-1][0]:
            last = pools.pop()
            pool = (last[0] + pool[0], last[1] + pool[1], last[2] + pool[2])
        pools.append(pool)
    return [good / count for count, good, width in pools for _ in range(width)]


def separation(traces: Sequence[Trace], signal: str) -> float:
    """Return the chance that an accepted draft has a higher signal than the first rejected one of
    another round: 1/2 where the signal says nothing. Equal signals count one half."""
    good, bad = [0] * (MOST + 1), [0] * (MOST + 1)
    for draft in drafts_of(traces, signal):
        (good if draft.is_accepted else bad)[draft.signal] += 1
    below, won = 0, 0.0
    for num_good, num_bad in zip(good, bad, strict=True):
        won += num_good * (below + num_bad / 2)
        below += num_bad
    return won / (sum(good) * below)
