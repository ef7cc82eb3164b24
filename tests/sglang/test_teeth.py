"""The identity checks work: each deliberate fault makes a comparison fail.

The tests compare KVSpec without and with a fault. Other tests show that KVSpec without faults
equals plain SGLang.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.client import GenerateClient
from harness.faults import fault_environment, fault_file_in
from harness.models import DEMO_MODEL
from harness.prompts import cut_prompts
from harness.servers import ServerSpec, ServerSwitch

pytestmark = pytest.mark.server

FAULTS = ("wrong_verifier", "skipped_rollback", "off_by_one_page", "stale_residual")
LENGTHS = (300, 500, 900, 1300)
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fault_file_in(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def client(servers: ServerSwitch, fault_file: Path) -> GenerateClient:
    spec = ServerSpec(
        DEMO_MODEL,
        # Few pages, so that each is reused soon.
        ("--max-total-tokens=4096", "--kvspec", "--kvspec-residual-hbm-fraction=0"),
        fault_environment(KVSPEC_FAULT_FILE=fault_file),
    )
    return servers.use(spec)


@pytest.fixture(scope="module")
def sound(client: GenerateClient) -> list[tuple[int, ...]]:
    return _answers(client)


def _answers(client: GenerateClient, *, reverse: bool = False) -> list[tuple[int, ...]]:
    """Return the outputs of the prompts in order. `reverse`: send them in reverse order, so that
    they get other pages."""
    client.flush_cache()
    prompts = list(cut_prompts(DEMO_MODEL, LENGTHS))
    asked = reversed(prompts) if reverse else prompts
    outputs = [client.generate(prompt.input_ids, NUM_TOKENS).output_ids for prompt in asked]
    return outputs[::-1] if reverse else outputs


def test_bad_drafts_change_nothing(
    client: GenerateClient, sound: list[tuple[int, ...]], fault_file: Path
) -> None:
    fault_file.write_text("bad_drafts")
    assert _answers(client, reverse=True) == sound


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(
    client: GenerateClient, sound: list[tuple[int, ...]], fault_file: Path, fault: str
) -> None:
    fault_file.write_text(f"bad_drafts {fault}")
    try:
        assert _answers(client, reverse=True) != sound
    finally:
        fault_file.write_text("none")
    assert _answers(client) == sound, "the fault must leave nothing behind"
