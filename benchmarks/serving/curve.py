"""Acceptance to replay: traces of whole requests, or a curve.

A curve is the probability that a verification keeps at least j drafts.

The curve is that of 4-bit drafts against the exact target on eval-31m (accept.CODEC.mean_of_N). The
int8 target replays the same curve. accept.CODEC_int8 says how long an 8-bit cache agrees with the
exact cache, not what an int8 target accepts of 4-bit drafts. The attention error of 8 bits is 1/250
of that of the drafts, so the error of the drafts decides.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from sglang_kvspec.core.config import MAX_DRAFT_LEN
from sglang_kvspec.planning.costs import AcceptanceCurve
from sglang_kvspec.planning.forecast import read_acceptance


def survival(curve: AcceptanceCurve, max_draft_len: int = MAX_DRAFT_LEN) -> list[float]:
    """Return P(at least j drafts accepted) for j = 1 .. max_draft_len. The mean accept length of N
    drafts is the sum of the first N.

    The mean is linear between measured lengths, as in the planner. The true curve is concave, so
    the linear one is never above it. A rise can only be noise, and is cut off.
    """
    means = [curve.expected_accepted(n) for n in range(max_draft_len + 1)]
    steps = [after - before for before, after in pairwise(means)]
    return list(accumulate(steps, min))


def write_acceptance(traces: Path | None, curve: Path, codec: str, path: Path) -> str:
    """Write what the replay plug-in reads to `path`: traces, if given, else a curve. Return a
    description of its source."""
    return write_curve(curve, codec, path) if traces is None else write_traces(traces, path)


def write_traces(views: Path, path: Path) -> str:
    """Write the traces of the views `all` and `pages` of a result of bench_views.py: by budget, one
    for each request."""
    results = json.loads(views.read_text(encoding="utf-8"))
    settings, by_budget = results["settings"], {}
    for name, rounds in results["settings"]["raw"].items():
        view, *asked = name.split(":")
        if view not in ("all", "pages"):
            continue
        budget = 1.0 if view == "all" else float(asked[0])
        by_budget[budget] = [matches(each["accepted"], settings["draft_len"]) for each in rounds]
    source = (
        f"traces of {views.name} ({settings['model']}, {settings['prompts']} prompts of "
        f"{settings['prompt_len']} tokens)"
    )
    path.write_text(json.dumps({"source": source, "traces": by_budget}), encoding="utf-8")
    return source


def matches(accepted: Sequence[int], draft_len: int) -> str:
    """Return, for each token of a request, 1 where a draft is the target's token and 0 where it is
    not. accepted: accept lengths of rounds of draft_len drafts, in order."""
    return "".join("1" * n + ("1" if n == draft_len else "0") for n in accepted)


def write_curve(acceptance: Path, codec: str, path: Path) -> str:
    """Write the curve for the replay plug-in to `path`. Return a description of its source."""
    results = json.loads(acceptance.read_text(encoding="utf-8"))
    probabilities = survival(read_acceptance(results, codec))
    settings = results.get("settings", {})
    source = (
        f"accept.{codec} of {acceptance.name} ({settings.get('model')}, "
        f"{settings.get('prompt_len')}-token prompts)"
    )
    path.write_text(json.dumps({"source": source, "survival": probabilities}), encoding="utf-8")
    return source
