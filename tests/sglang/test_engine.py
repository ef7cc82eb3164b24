"""`sglang.Engine` takes kvspec options as keyword arguments."""

from __future__ import annotations

import pytest
from harness.engine_run import run_engine
from harness.models import DEMO_MODEL
from harness.servers import ServerSwitch

pytestmark = pytest.mark.server


def test_engine_serves_with_keyword_arguments(servers: ServerSwitch) -> None:
    servers.release()
    options = {
        "model_path": str(DEMO_MODEL),
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 4096,
        "mem_fraction_static": 0.1,
        "kvspec": True,
        "kvspec_codec": "uniform4",
        "kvspec_target": "int8",
        "kvspec_draft_len": 9,
        "kvspec_host_gb": 0,
    }
    params = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    question = {"prompt": "import os\n" * 60, "sampling_params": params}
    answer, info = run_engine(options, question)
    report = info["internal_states"][0]["kvspec"]
    assert answer["meta_info"]["completion_tokens"] == 60
    assert max(len(answer["meta_info"]["kvspec"]["accept_histogram"]) - 1, 0) <= 9
    config = report["config"]
    assert (config["codec"], config["target"], config["draft_len"]) == ("uniform4", "int8", 9)
    # Without a host store every residual has a place in KV memory, and nothing is fetched.
    pools = report["pools"]
    assert (pools["residual_store_pages"], pools["residual_cache_pages"]) == (0, 64)
    assert report["bytes_fetched"] == report["bytes_streamed"] == 0
