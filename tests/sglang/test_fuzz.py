"""Generated requests, valid and invalid, do not change a server or the answers to other
requests."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hardening.fuzzer import Fuzzer, ask_generate, held_by, run
from harness.feature_answers import KVSPEC
from harness.servers import ServerSwitch

pytestmark = pytest.mark.server

# `make fuzz` sends twenty times as many, to servers of every setting and role.
NUM_REQUESTS = 500
# Tokens in the vocabulary of demo-5m.
VOCAB_SIZE = 4096


def test_a_server_survives_generated_requests(servers: ServerSwitch) -> None:
    url = servers.use(KVSPEC).base_url
    fuzzer = Fuzzer(
        url,
        ask=partial(ask_generate, url),
        held=partial(held_by, url),
        logs=[Path(servers.log_path)],
    )
    result = run(fuzzer, VOCAB_SIZE, NUM_REQUESTS, seed=1)
    assert result.findings() == []
    assert result.requests == NUM_REQUESTS
    assert result.statuses[200] > NUM_REQUESTS // 4, "too few requests reach the scheduler"
    assert result.statuses[400] > NUM_REQUESTS // 10, "too few requests are refused"
