"""A command that does not come up is distinguished from one that does."""

from __future__ import annotations

import pytest

from kvspec_testkit.servers.http_process import HttpProcess, ServerStartError


def test_a_command_that_ends_is_reported_with_its_log(tmp_path):
    path = tmp_path / "deep" / "door.log"
    command = ("sh", "-c", "echo no such port; exit 3")
    process = HttpProcess(command, base_url="http://127.0.0.1:9", log_path=path)
    assert process.log_tail() == ""
    with pytest.raises(ServerStartError, match="exited with status 3") as reported, process:
        process.wait_healthy(timeout_s=20)
    assert str(path) in str(reported.value)
    assert "no such port" in str(reported.value)


def test_a_command_that_stays_silent_is_ended(tmp_path):
    process = HttpProcess(
        ("sleep", "600"), base_url="http://127.0.0.1:9", log_path=tmp_path / "log"
    )
    with pytest.raises(ServerStartError, match="not healthy after 0 s"), process:
        process.wait_healthy(timeout_s=0)
    assert process.returncode is not None
