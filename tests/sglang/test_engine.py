"""`sglang.Engine` takes kvspec options as keyword arguments."""

from __future__ import annotations

import pytest
import sglang
from harness.models import DEMO_MODEL
from harness.servers import ServerSwitch

from sglang_kvspec.testing.port_lease import PortLease

pytestmark = pytest.mark.server


def test_engine_serves_with_keyword_arguments(
    servers: ServerSwitch, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.release()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ports = PortLease()
    engine = sglang.Engine(
        model_path=str(DEMO_MODEL),
        device="cpu",
        dtype="float32",
        max_total_tokens=4096,
        mem_fraction_static=0.1,
        random_seed=0,
        port=ports.http,
        nccl_port=ports.rendezvous,
        kvspec=True,
        kvspec_codec="uniform4",
        kvspec_target="int8",
        kvspec_draft_len=9,
        kvspec_host_gb=0,
    )
    try:
        params = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
        answer = engine.generate(prompt="import os\n" * 60, sampling_params=params)
        report = engine.get_server_info()["internal_states"][0]["kvspec"]
    finally:
        engine.shutdown()
        ports.release()
    assert answer["meta_info"]["completion_tokens"] == 60
    assert max(len(answer["meta_info"]["kvspec"]["accept_histogram"]) - 1, 0) <= 9
    config = report["config"]
    assert (config["codec"], config["target"], config["draft_len"]) == ("uniform4", "int8", 9)
    # Without a host store every residual has its place in KV memory, and nothing is fetched.
    pools = report["pools"]
    assert (pools["residual_store_pages"], pools["residual_cache_pages"]) == (0, 64)
    assert report["bytes_fetched"] == report["bytes_streamed"] == 0
