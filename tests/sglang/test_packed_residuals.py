"""Packed residuals in prefix tiers and on the link between two servers change no answer.

The packed form needs a KV cache in bf16, where near-ties flip with the shape of a forward. So
servers with raw and with packed residuals answer the same requests one by one, with the same
drafts, and all forwards have equal shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import requests
from harness.client import GenerateClient, Output
from harness.models import DEMO_MODEL
from harness.pair import PairSpec, running_pair, wait_until_stored
from harness.prompts import cut_prompts
from harness.servers import Announce, ServerSpec, ServerSwitch

pytestmark = pytest.mark.server

FORMS = ("raw", "packed")
BF16 = "--dtype=bfloat16"
# Together one and a half times the pool.
LENGTHS = (300, 1500, 700, 1025)
NUM_TOKENS = 24
Answers = list[tuple[int, ...]]


def ask(client: GenerateClient) -> list[Output]:
    prompts = cut_prompts(DEMO_MODEL, LENGTHS)
    return [client.generate(prompt.input_ids, NUM_TOKENS) for prompt in prompts]


def tokens_of(answers: Sequence[Output]) -> Answers:
    return [answer.output_ids for answer in answers]


def with_tiers(
    servers: ServerSwitch, folder: Path, form: str
) -> tuple[Answers, dict[str, int], int]:
    """Return a server's answers to cold and to cached prompts, its hit tokens by tier, and the
    bytes of residuals that its tiers gave back."""
    spec = ServerSpec(
        DEMO_MODEL,
        (
            BF16,
            "--max-total-tokens=2560",
            "--kvspec",
            "--kvspec-draft-len=4",
            "--kvspec-prefix-host-gb=0.006",
            f"--kvspec-prefix-dir={folder / form}",
            f"--kvspec-exact-residual={form}",
        ),
    )
    client = servers.use(spec)
    answers = tokens_of(ask(client))
    wait_until_stored(client, "disk")
    answers += tokens_of(ask(client))
    report = client.kvspec_report()
    tiers = report["prefix_tiers"]
    assert tiers["too_large"] == 0
    return answers, report["counters"]["hit_tokens"], tiers["loaded_bytes"]["residuals"]


def test_tiers(servers: ServerSwitch, tmp_path: Path) -> None:
    raw, packed = (with_tiers(servers, tmp_path, form) for form in FORMS)
    assert packed[0] == raw[0]
    assert packed[1]["disk"] > 0
    # Tiers of one size hold more packed pages, so servers load from other tiers, but as many pages.
    loaded = [sum(hits[tier] for tier in ("host", "disk")) for _, hits, _ in (raw, packed)]
    assert loaded[1] == loaded[0]
    assert 0.5 < packed[2] / raw[2] < 0.6


def over_a_link(folder: Path, announce: Announce, form: str) -> tuple[Answers, int]:
    """Return the answers of two servers, and the bytes of residuals on their link. Without drafts,
    when residuals arrive does not matter."""
    spec = PairSpec(
        DEMO_MODEL,
        (BF16, "--max-total-tokens=8192", f"--kvspec-exact-residual={form}"),
        decode=("--kvspec-draft-len=0",),
    )
    with running_pair(spec, folder / form, announce) as pair:
        answers = ask(pair.client)
        sent = sum(answer.meta["kvspec"]["transfer"]["bytes"]["residuals"] for answer in answers)
        if form == "packed":
            pair.restart_decode("--kvspec-exact-residual=raw")
            with pytest.raises(requests.HTTPError, match=r"raw residuals|packed_1 residuals"):
                ask(pair.client)
        return tokens_of(answers), sent


def test_transfers(tmp_path: Path, announce: Announce) -> None:
    raw, packed = (over_a_link(tmp_path, announce, form) for form in FORMS)
    assert packed[0] == raw[0]
    assert 0.5 < packed[1] / raw[1] < 0.55
