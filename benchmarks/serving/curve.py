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
from typing import NamedTuple

from compressors.names import DENSE4_LABEL, Method

from sglang_kvspec.core.config import MAX_DRAFT_LEN
from sglang_kvspec.planning.compressor_choice import ALL_TOKENS
from sglang_kvspec.planning.costs import AcceptanceCurve
from sglang_kvspec.planning.draft_budget import BUDGETS
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


class Traces(NamedTuple):
    """Where traces are. scorer: None for the views `all` and `pages` of a result of bench_views.py,
    else of a result of bench_compressors.py."""

    path: Path
    scorer: str | None = None

    @classmethod
    def of(cls, text: str) -> Traces:
        """Return what RESULT[:SCORER] names."""
        path, _, scorer = text.partition(":")
        return cls(Path(path), scorer or None)

    def unrecorded_budgets(self) -> list[float]:
        """Return the draft budgets among which a server may choose, but which have no traces."""
        if self.scorer is not None:
            # A server with a compressor has one budget.
            return []
        results = json.loads(self.path.read_text(encoding="utf-8"))
        recorded = set(map(self.budget_of, results["settings"]["raw"]))
        return [budget for budget in BUDGETS if budget not in recorded]

    def budget_of(self, name: str) -> float | None:
        """Return the draft budget of a method of the result; None for one that is not replayed."""
        if self.scorer is None:
            view, *asked = name.split(":")
            if view == "all":
                return 1.0
            return float(asked[0]) if view == "pages" else None
        method = Method.of(name)
        is_wanted = method.scorer in (self.scorer, ALL_TOKENS) and method.anchors == DENSE4_LABEL
        return method.budget if is_wanted else None


def write_acceptance(traces: Traces | None, curve: Path, codec: str, path: Path) -> str:
    """Write what the replay plug-in reads to `path`: traces, if given, else a curve. Return a
    description of its source."""
    return write_curve(curve, codec, path) if traces is None else write_traces(traces, path)


def write_traces(traces: Traces, path: Path) -> str:
    """Write traces by draft budget, one for each request. Return a description of their source.
    Raises ValueError if the result has none."""
    results = json.loads(traces.path.read_text(encoding="utf-8"))
    settings, by_budget = results["settings"], {}
    for name, rounds in results["settings"]["raw"].items():
        budget = traces.budget_of(name)
        if budget is not None:
            accepted = [each["accepted"] for each in rounds]
            by_budget[budget] = [matches(each, settings["draft_len"]) for each in accepted]
    # All tokens are every scorer's, at the budget 1.
    if not by_budget or (traces.scorer and set(by_budget) == {1.0}):
        raise ValueError(f"{traces.path} has no traces of {traces.scorer or 'views'}")
    source = (
        f"traces of {':'.join(filter(None, (traces.path.name, traces.scorer)))} "
        f"({settings['model']}, {settings['prompts']} prompts of {settings['prompt_len']} tokens)"
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
