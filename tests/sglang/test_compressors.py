"""Drafts that read what a compressor keeps, on a real server: every answer is plain SGLang's."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.client import GenerateClient
from harness.models import DEMO_MODEL
from harness.plugin_folders import PLUGINS, python_path_with
from harness.references import PlainReference, Setting, Workload
from harness.servers import ServerSwitch
from harness.suite import run_one_by_one

pytestmark = pytest.mark.server

# Lengths that end a page, that begin one, and of several chunks.
WORKLOAD = Workload(DEMO_MODEL, (128, 193, 700, 1500), max_new_tokens=64)
FAMILIES = False


def served_with(servers: ServerSwitch, compressor: str, schedule: str) -> GenerateClient:
    flags = (
        f"--kvspec-compressor={compressor}",
        "--kvspec-draft-budget=0.1",
        "--chunked-prefill-size=512",
    )
    spec = Setting("exact", "uniform4", schedule, "auto").server(DEMO_MODEL, *flags)
    return servers.use(replace(spec, environment=(("PYTHONPATH", python_path_with(PLUGINS)),)))


def assert_lossless(
    client: GenerateClient, reference: PlainReference, compressor: str
) -> dict[str, Any]:
    """Compare answers with plain SGLang's. Return the server's report."""
    # The second time, prompts are cached prefixes, whose scores are known.
    for _ in range(2):
        reference.check(run_one_by_one(client, reference.suite.prompts, lambda: None))
    report = client.kvspec_report()
    assert report["config"]["compressor"] == compressor
    assert report["counters"]["drafted"] > report["counters"]["accepted"] > 0
    # A tenth of the prompt's pages, and the tokens behind it.
    assert 0.1 < report["draft_reads"]["share"] < 0.5
    assert report["draft_reads"]["selection_ms"] > 0
    return report


def test_anchors_that_no_draft_reads_are_freed(
    servers: ServerSwitch, reference: PlainReference
) -> None:
    compressor = "snapkv:keep_anchors=false"
    client = served_with(servers, compressor, "rounds")
    report = assert_lossless(client, reference, compressor)
    pools, freed = report["pools"], report["freed_anchors"]
    # A tenth of all pages for what drafts read, a tenth for answers, and those of one prompt.
    pages_of_a_prompt = pools["anchor_pages"] - math.ceil(0.2 * pools["num_pages"])
    assert 0 < pages_of_a_prompt < pools["num_pages"] / 2
    # Cached prefixes keep all other pages, but not their anchors.
    held = freed["pages_with_anchors"]
    assert held + freed["freed"] == pools["num_pages_allocated"]
    assert 0 < held < pools["num_pages_allocated"] / 2
    assert (freed["idle"], freed["without"]) == (0, 0)
    client.flush_cache()
    assert client.kvspec_report()["freed_anchors"]["pages_with_anchors"] == 0


def test_drafts_that_read_random_tokens_change_no_answer(
    servers: ServerSwitch, reference: PlainReference
) -> None:
    compressor = "random:seed=7,by=tokens,heads=layer"
    assert_lossless(served_with(servers, compressor, "rounds"), reference, compressor)


def test_a_scorer_of_another_package_is_shown_what_the_model_computes(
    servers: ServerSwitch, reference: PlainReference, tmp_path: Path
) -> None:
    compressor = f"checked_inputs:log={tmp_path / 'errors'}"
    assert_lossless(served_with(servers, compressor, "staggered"), reference, compressor)
    lines = (tmp_path / "errors").read_text().splitlines()
    # The start tries random tensors, one chunk a layer, which do not fit together.
    num_layers = json.loads((DEMO_MODEL / "config.json").read_text())["num_hidden_layers"]
    tried, served = lines[:num_layers], [line.split() for line in lines[num_layers:]]
    assert all(float(line.split()[1]) > 0.1 for line in tried)
    # Chunks of whole prompts, of their ends, and of repeats.
    assert {"0", "512", "1500"} <= {start for start, _ in served}
    # Products in fp32 round to about 1e-6 of their size.
    assert max(float(error) for _, error in served) < 1e-4
