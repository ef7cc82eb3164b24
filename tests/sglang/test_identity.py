"""The real server with --kvspec gives the right answers, token by token, however requests arrive.

The `exact` target is compared with plain SGLang, and the `int8` target with the same server and
drafting off. A sample runs with the other tests; `make identity` runs the full matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import requests
from harness import scenarios
from harness.comparison import compare
from harness.identity_report import IdentityReport, ScenarioResult
from harness.models import DEMO_MODEL, EVAL_MODEL, chat_model
from harness.progress import Progress
from harness.prompts import prompt_lengths
from harness.references import (
    PlainReference,
    Reference,
    Setting,
    UndraftedReference,
    Workload,
)
from harness.scenarios import Scenario
from harness.servers import Announce, ServerSwitch
from harness.shard import Shard

from kvspec_testkit.models.gptq_copy import write_gptq

pytestmark = pytest.mark.server

UNIFORM4, LOG4 = Setting("exact", "uniform4"), Setting("exact", "log4")
UNIFORM4_INT8 = Setting("int8", "uniform4")
UNIFORM4_ROUNDS = Setting("exact", "uniform4", "rounds")
PAGES_ROUNDS = Setting("exact", "uniform4", "rounds", "pages")
INT4_ROUNDS = Setting("exact", "uniform4", "rounds", weights="int4")
NGRAM_ROUNDS = Setting("exact", "uniform4", "rounds", drafter="ngram")
NGRAM_PAGES = replace(NGRAM_ROUNDS, view="pages")
NGRAM_INT4 = replace(NGRAM_ROUNDS, weights="int4")
# Settings of the full matrix, by target. The first of each target is the default of a server.
FULL_EXACT = (
    UNIFORM4_ROUNDS,
    UNIFORM4,
    Setting("exact", "log4", "rounds"),
    PAGES_ROUNDS,
    Setting("exact", "uniform4", "staggered", "pages"),
    NGRAM_ROUNDS,
)
FULL_INT8 = (
    Setting("int8", "uniform4", "rounds"),
    UNIFORM4_INT8,
    Setting("int8", "log4", "rounds"),
)

# Eight lengths, so that all requests can run at once. One is a token short of two pages, and one is
# long.
SAMPLE_LENGTHS = (127, 1500, 300, 5200, 192, 350, 200, 1025)
SAMPLE = Workload(DEMO_MODEL, SAMPLE_LENGTHS, max_new_tokens=80)
# A shorter workload: the reference drafts nothing and reads the whole target for every token, which
# takes most of the time.
SAMPLE_INT8 = Workload(DEMO_MODEL, (127, 700, 300, 192), max_new_tokens=80)
SAMPLE_SCENARIOS = (scenarios.STRICT_CHECKS, scenarios.STRICT_PREFIX_HITS)
SAMPLE_INT8_SCENARIOS = (scenarios.ALONE, scenarios.STAGGERED)

FULL_NEW_TOKENS = 256
# A real chat model with 8K tokens of context.
CHAT_LENGTHS = (127, 1025, 2600, 7600)
CHAT_SCENARIOS = (scenarios.ALONE, scenarios.STAGGERED, scenarios.PREFIX_HITS)
REPEATABLE = tuple(scenario for scenario in scenarios.FULL_MATRIX if scenario.repeatable)

Check = Callable[[Workload, Setting, Scenario], None]


@pytest.fixture(scope="module")
def reference_of(
    request: pytest.FixtureRequest, servers: ServerSwitch, announce: Announce
) -> Callable[[Workload, Setting], Reference]:
    """Return the reference of a workload and a setting, computed once."""
    cache_folder = request.config.getoption("--reference-cache")
    known: dict[tuple[Workload, Setting | None], Reference] = {}

    def get(workload: Workload, setting: Setting) -> Reference:
        if setting.target == "exact":
            # Plain SGLang has no codec, so one reference serves all settings.
            if (workload, None) not in known:
                wanted = (*scenarios.FULL_MATRIX, *SAMPLE_SCENARIOS)
                wanted = _asked_for(request.session.items, wanted, workload.model)
                known[workload, None] = PlainReference(
                    servers, workload, wanted, announce, cache_folder
                )
            return known[workload, None]
        if (workload, setting) not in known:
            wanted = SAMPLE_INT8_SCENARIOS if workload is SAMPLE_INT8 else REPEATABLE
            wanted = _asked_for(request.session.items, wanted, workload.model, setting)
            known[workload, setting] = UndraftedReference(
                servers, workload, setting, wanted, announce, cache_folder
            )
        return known[workload, setting]

    return get


def _asked_for(
    items: Sequence[pytest.Item], wanted: Sequence[Scenario], model: Path, *settings: Setting
) -> tuple[Scenario, ...]:
    """Return those of `wanted` that tests of this session run on a model, and in these settings if
    any are given."""
    asked = set()
    for item in items:
        callspec = getattr(item, "callspec", None)
        params = callspec.params if callspec else {}
        of_model = params.get("model", model) == model
        of_setting = not settings or params.get("setting", *settings) in settings
        if of_model and of_setting:
            asked.add(params.get("scenario"))
    return tuple(scenario for scenario in wanted if scenario in asked)


@pytest.fixture
def assert_identical(
    servers: ServerSwitch,
    announce: Announce,
    reference_of: Callable[[Workload, Setting], Reference],
    identity_report: IdentityReport,
) -> Check:
    """Run a scenario on the drafting server, compare, record, and fail on any difference."""

    def check(workload: Workload, setting: Setting, scenario: Scenario) -> None:
        if not workload.model.exists():
            pytest.skip(f"{workload.model.name} is not on this machine")
        reference = reference_of(workload, setting)
        client = servers.use(scenario.server(setting.server(workload.model)))
        label = f"{workload.model.name} {setting}, {scenario.name}"
        progress = Progress(label, announce)
        answers = scenario.run(client, reference.suite, progress.done)
        mismatches = compare(answers, reference.expected(scenario, answers))
        identity_report.add(
            ScenarioResult(
                model=workload.model.name,
                setting=str(setting),
                scenario=scenario.name,
                baseline=reference.baseline,
                num_prompts=len(reference.suite.prompts),
                num_answers=len(answers),
                num_retractions=sum(output.num_retractions for _, output in answers),
                mismatches=tuple(mismatches),
                elapsed_s=progress.elapsed_s,
            )
        )
        announce(
            f"{label}: {len(mismatches)} of {len(answers)} answers differ, "
            f"{progress.elapsed_s:.0f} s"
        )
        assert not mismatches, "\n".join(map(str, mismatches))
        scenario.check(answers, servers.log_path)

    return check


@pytest.mark.parametrize("scenario", SAMPLE_SCENARIOS, ids=lambda s: s.name)
def test_exact(assert_identical: Check, scenario: Scenario) -> None:
    assert_identical(SAMPLE, UNIFORM4, scenario)


@pytest.mark.parametrize("scenario", SAMPLE_SCENARIOS, ids=lambda s: s.name)
def test_exact_on_pages_of_the_largest_mass(assert_identical: Check, scenario: Scenario) -> None:
    assert_identical(SAMPLE, PAGES_ROUNDS, scenario)


def test_an_answer_says_what_its_drafts_read_of_the_attention(servers: ServerSwitch) -> None:
    client = servers.use(SAMPLE_SCENARIOS[0].server(PAGES_ROUNDS.server(DEMO_MODEL)))
    prompt = max((task.input_ids for task in SAMPLE.tasks), key=len)
    reads = client.generate(prompt, 40).meta["kvspec"]["draft_reads"]
    assert reads["share"] < reads["mass"] < 1, "the pages with the most mass are read"
    assert reads["selection_ms"] > 0
    total = client.kvspec_report()["draft_reads"]
    assert total["selection_ms"] >= reads["selection_ms"]
    assert 0 < total["mass"] < 1


@pytest.mark.parametrize("scenario", SAMPLE_SCENARIOS, ids=lambda s: s.name)
def test_exact_with_draft_weights_of_four_bits(assert_identical: Check, scenario: Scenario) -> None:
    assert_identical(SAMPLE, INT4_ROUNDS, scenario)


def test_draft_weights_follow_new_weights(servers: ServerSwitch) -> None:
    """Load the same weights again, so that the answer must not change."""
    client = servers.use(SAMPLE_SCENARIOS[0].server(INT4_ROUNDS.server(DEMO_MODEL)))
    prompt = SAMPLE.tasks[0].input_ids
    before = client.generate(prompt, 40)
    made = client.kvspec_report()["draft_weights"]["made"]
    reply = requests.post(
        f"{client.base_url}/update_weights_from_disk",
        json={"model_path": str(DEMO_MODEL)},
        timeout=60,
    )
    assert reply.json()["success"], reply.text
    assert client.generate(prompt, 40).output_ids == before.output_ids
    report = client.kvspec_report()
    assert report["draft_weights"]["kind"] == "int4"
    assert report["draft_weights"]["projection"]
    assert report["draft_weights"]["made"] == made + 1
    # Copies agree with the model mostly, not always.
    assert 0 < report["counters"]["accepted"] < report["counters"]["drafted"]


def test_exact_with_draft_weights_of_a_checkpoint(
    assert_identical: Check, servers: ServerSwitch, tmp_path: Path
) -> None:
    folder = tmp_path / "gptq"
    write_gptq(DEMO_MODEL, folder)
    setting = replace(INT4_ROUNDS, weights=str(folder))
    scenario = SAMPLE_SCENARIOS[0]
    assert_identical(SAMPLE, setting, scenario)
    client = servers.use(scenario.server(setting.server(DEMO_MODEL)))
    client.generate(SAMPLE.tasks[0].input_ids, 40)
    report = client.kvspec_report()
    assert report["draft_weights"]["checkpoint"] == str(folder)
    assert not report["draft_weights"]["projection"]
    assert 0 < report["counters"]["accepted"] < report["counters"]["drafted"]


@pytest.mark.parametrize("scenario", SAMPLE_SCENARIOS, ids=lambda s: s.name)
def test_exact_with_proposals_of_ngrams(assert_identical: Check, scenario: Scenario) -> None:
    assert_identical(SAMPLE, NGRAM_ROUNDS, scenario)


def test_an_answer_says_how_many_proposals_were_kept(servers: ServerSwitch) -> None:
    client = servers.use(SAMPLE_SCENARIOS[0].server(NGRAM_ROUNDS.server(DEMO_MODEL)))
    prompt = max((task.input_ids for task in SAMPLE.tasks), key=len)
    before = client.kvspec_report()["ngram"]
    told = client.generate(prompt, 80).meta["kvspec"]["ngram"]
    assert 0 < told["kept"] < told["proposed"]
    assert told["tokens_per_step"] == 1 + told["kept"] / told["steps"]
    after = client.kvspec_report()["ngram"]
    for name in ("steps", "proposed", "kept"):
        assert after[name] - before[name] == told[name]


@pytest.mark.identity
@pytest.mark.parametrize("setting", [NGRAM_ROUNDS, NGRAM_INT4], ids=str)
def test_exact_with_proposals_after_retractions(assert_identical: Check, setting: Setting) -> None:
    assert_identical(SAMPLE, setting, scenarios.CHUNKED_RETRACTION)


@pytest.mark.identity
def test_exact_with_proposals_on_pages_of_the_largest_mass(assert_identical: Check) -> None:
    assert_identical(SAMPLE, NGRAM_PAGES, scenarios.STRICT_CHECKS)


# The only server in CI with codec log4.
def test_exact_log4(assert_identical: Check) -> None:
    assert_identical(SAMPLE, LOG4, scenarios.STRICT_CHECKS)


@pytest.mark.identity
def test_exact_log4_retracted_in_small_chunks(assert_identical: Check) -> None:
    assert_identical(SAMPLE, LOG4, scenarios.CHUNKED_RETRACTION)


# CI tests rounds on two ranks, and pre-launched rounds, elsewhere.
@pytest.mark.identity
def test_exact_in_rounds(assert_identical: Check) -> None:
    assert_identical(SAMPLE, UNIFORM4_ROUNDS, scenarios.CHUNKED_RETRACTION)


@pytest.mark.parametrize("scenario", SAMPLE_INT8_SCENARIOS, ids=lambda s: s.name)
def test_int8(assert_identical: Check, scenario: Scenario) -> None:
    assert_identical(SAMPLE_INT8, UNIFORM4_INT8, scenario)


def full_workload(model: Path, setting: Setting, shard: Shard) -> Workload:
    """Return all prompts for the default setting on the small model, every second for its other
    settings, and every fourth on the large model, which takes six times as long."""
    every = 4 if model == EVAL_MODEL else 1 if setting in (FULL_EXACT[0], FULL_INT8[0]) else 2
    return Workload(model, prompt_lengths()[::every], FULL_NEW_TOKENS, shard)


@pytest.fixture(scope="module")
def shard(request: pytest.FixtureRequest) -> Shard:
    return request.config.getoption("--identity-shard")


@pytest.mark.identity
@pytest.mark.parametrize("scenario", scenarios.FULL_MATRIX, ids=lambda s: s.name)
@pytest.mark.parametrize("setting", FULL_EXACT, ids=str)
@pytest.mark.parametrize("model", [DEMO_MODEL, EVAL_MODEL], ids=lambda m: m.name)
def test_exact_in_full(
    assert_identical: Check, shard: Shard, model: Path, setting: Setting, scenario: Scenario
) -> None:
    assert_identical(full_workload(model, setting, shard), setting, scenario)


@pytest.mark.identity
@pytest.mark.parametrize("scenario", REPEATABLE, ids=lambda s: s.name)
@pytest.mark.parametrize("setting", FULL_INT8, ids=str)
@pytest.mark.parametrize("model", [DEMO_MODEL, EVAL_MODEL], ids=lambda m: m.name)
def test_int8_in_full(
    assert_identical: Check, shard: Shard, model: Path, setting: Setting, scenario: Scenario
) -> None:
    assert_identical(full_workload(model, setting, shard), setting, scenario)


@pytest.mark.identity
@pytest.mark.parametrize("scenario", CHAT_SCENARIOS, ids=lambda s: s.name)
@pytest.mark.parametrize("setting", FULL_EXACT[:2], ids=str)
def test_exact_with_a_chat_model(
    assert_identical: Check, setting: Setting, scenario: Scenario
) -> None:
    assert_identical(Workload(chat_model(), CHAT_LENGTHS, max_new_tokens=96), setting, scenario)
