"""Ways to send a suite, the server that each needs, and the check of what happened there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness.arrival import run_staggered
from harness.client import GenerateClient
from harness.faults import fault_environment
from harness.servers import ServerSpec
from harness.suite import Answers, OnDone, Suite, Task, run_one_by_one

PAGE_SIZE = 64

Drive = Callable[[GenerateClient, Suite, OnDone], Answers]
Check = Callable[[Answers, Path], None]


@dataclass(frozen=True)
class Scenario:
    """A way to send a suite. arguments and environment are added to the server's.

    check(answers, log) raises AssertionError unless the events that the scenario tests have
    happened. repeatable: two servers that compute alike answer alike, whatever the timing. The int8
    target depends on where a prefill was cut, and retraction and concurrent chunks make that
    random.
    """

    name: str
    drive: Drive
    check: Check
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    repeatable: bool = True

    @property
    def with_families(self) -> bool:
        """Return whether the scenario sends the suite's families instead of its prompts."""
        return self.drive in (_families, _families_staggered)

    def server(self, base: ServerSpec) -> ServerSpec:
        return replace(
            base,
            arguments=(*base.arguments, *self.arguments),
            environment=(*base.environment, *self.environment),
        )

    def run(self, client: GenerateClient, suite: Suite, on_done: OnDone) -> Answers:
        """Flush the server's cache, then send the suite to it."""
        client.flush_cache()
        return self.drive(client, suite, on_done)


def _alone(client: GenerateClient, suite: Suite, on_done: OnDone) -> Answers:
    return run_one_by_one(client, suite.prompts, on_done)


def _staggered(client: GenerateClient, suite: Suite, on_done: OnDone) -> Answers:
    return run_staggered(client, suite.prompts, on_done)


def _families(client: GenerateClient, suite: Suite, on_done: OnDone) -> Answers:
    return run_one_by_one(client, _family_tasks(suite), on_done)


def _families_staggered(client: GenerateClient, suite: Suite, on_done: OnDone) -> Answers:
    return run_staggered(client, _family_tasks(suite), on_done)


def _family_tasks(suite: Suite) -> list[Task]:
    """Return each follower directly after its leader, so that nothing is evicted in between."""
    return [task for family in suite.families for task in (family.leader, family.follower)]


def _nothing_more(answers: Answers, log_path: Path) -> None:
    assert answers


def _some_prefix_was_hit(answers: Answers, log_path: Path) -> None:
    assert sum(output.cached_len for _, output in answers) > 0, "no prefix was hit"


def _prefixes_were_hit(answers: Answers, log_path: Path) -> None:
    """Check that every full page of an earlier request of the family was reused."""
    written: list[tuple[int, ...]] = []
    for task, output in answers:
        # The last token is always computed, for its logits.
        longest = max((_common_len(task.input_ids[:-1], earlier) for earlier in written), default=0)
        expected = longest // PAGE_SIZE * PAGE_SIZE
        assert output.cached_len >= expected, f"{task.name}: {output.cached_len} of {expected}"
        # The last token of an answer is never fed back, so its KV does not exist.
        written.append(task.input_ids + output.output_ids[:-1])
    _some_prefix_was_hit(answers, log_path)


def _common_len(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def _requests_were_retracted(answers: Answers, log_path: Path) -> None:
    assert sum(output.num_retractions for _, output in answers) > 0, "nothing was retracted"


def _memory_was_checked(answers: Answers, log_path: Path) -> None:
    log = log_path.read_text(encoding="utf-8", errors="replace")
    assert "[Mem Check (BUSY)]" in log, f"no memory check in {log_path}"


def _all_of(*checks: Check) -> Check:
    def check(answers: Answers, log_path: Path) -> None:
        for one in checks:
            one(answers, log_path)

    return check


# Level 2 also logs every check, which proves that the checks ran. A failed check ends the server.
_STRICT = (
    ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "2"),
    ("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1"),
)


def retract_every(steps: int) -> tuple[tuple[str, str], ...]:
    """Return the environment of a server that retracts a request every `steps` steps, if several
    run then."""
    return (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", str(steps)))


# Neither a divisor nor a multiple of a draft length, so that retraction meets every phase of a
# draft.
_RETRACT_EVERY_37 = retract_every(37)
_SMALL_CHUNKS = ("--chunked-prefill-size=256",)

ALONE = Scenario("alone", _alone, _nothing_more)
STAGGERED = Scenario("staggered", _staggered, _nothing_more)
PREFIX_HITS = Scenario("prefix hits", _families, _prefixes_were_hit)
CHUNKED = Scenario("small chunks", _alone, _nothing_more, arguments=_SMALL_CHUNKS)
CHUNKED_STAGGERED = replace(
    CHUNKED, name="small chunks, staggered", drive=_staggered, repeatable=False
)
FORCED_RETRACTION = Scenario(
    "forced retraction",
    _staggered,
    _requests_were_retracted,
    environment=_RETRACT_EVERY_37,
    repeatable=False,
)
FULL_POOL = Scenario(
    "full pool",
    _staggered,
    _requests_were_retracted,
    # Almost no pages are reserved for answers at admission, so that running requests run out of
    # pages.
    arguments=("--max-total-tokens=8192", "--schedule-conservativeness=0.05"),
    environment=fault_environment(KVSPEC_HEADROOM_TOKENS=0),
    repeatable=False,
)
STRICT_CHECKS = Scenario("strict checks", _staggered, _memory_was_checked, environment=_STRICT)
STRICT_PREFIX_HITS = Scenario(
    "strict checks, prefix hits",
    _families,
    _all_of(_prefixes_were_hit, _memory_was_checked),
    environment=_STRICT,
)
STRICT_FAMILIES = Scenario(
    "strict checks, prefix hits, staggered",
    _families_staggered,
    _all_of(_some_prefix_was_hit, _memory_was_checked),
    environment=_STRICT,
    repeatable=False,
)
CHUNKED_RETRACTION = Scenario(
    "small chunks, forced retraction, strict checks",
    _staggered,
    _all_of(_requests_were_retracted, _memory_was_checked),
    arguments=_SMALL_CHUNKS,
    environment=_RETRACT_EVERY_37 + _STRICT,
    repeatable=False,
)

# Successive scenarios that need the same server share one process.
FULL_MATRIX = (
    ALONE,
    STAGGERED,
    PREFIX_HITS,
    CHUNKED,
    CHUNKED_STAGGERED,
    FORCED_RETRACTION,
    FULL_POOL,
    STRICT_CHECKS,
    STRICT_FAMILIES,
)
