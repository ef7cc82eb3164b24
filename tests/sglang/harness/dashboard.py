"""A Prometheus process that scrapes a server, with the alerts of the example."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from kvspec_testkit.monitoring import MONITORING
from kvspec_testkit.servers.port_lease import PortLease

# Rows that every server fills. The other rows show tiers and links, which a server may not have.
FILLED = ("Drafting", "Memory and residuals", "Pressure")
START_TIMEOUT_S = 60.0


def has_prometheus() -> bool:
    return shutil.which("prometheus") is not None


@contextmanager
def prometheus(server_url: str, folder: Path) -> Iterator[str]:
    """Run Prometheus with the example's rules on a server. Yield its URL after two scrapes."""
    config = folder / "prometheus.yml"
    target = server_url.removeprefix("http://")
    config.write_text(
        # A scrape may take as long as the interval: seconds, on a busy machine.
        "global: {scrape_interval: 5s, evaluation_interval: 1s}\n"
        f"scrape_configs: [{{job_name: s, static_configs: [{{targets: ['{target}']}}]}}]\n"
        f"rule_files: ['{MONITORING / 'alerts.yml'}']\n"
    )
    port = PortLease()
    with (folder / "prometheus.log").open("w") as log:
        command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port.http}",
        ]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        url = f"http://127.0.0.1:{port.http}"
        try:
            _await_scrapes(url, process)
            yield url
        finally:
            process.terminate()
            process.wait()
            port.release()


def ask(url: str, query: str) -> list[dict[str, Any]]:
    """Return the samples that a query finds. Raises AssertionError where Prometheus refuses the
    query."""
    reply = requests.get(f"{url}/api/v1/query", params={"query": query}, timeout=30).json()
    assert reply["status"] == "success", f"{query}: {reply.get('error')}"
    return list(reply["data"]["result"])


def _await_scrapes(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a counter has two samples, since a rate needs two."""
    deadline = time.monotonic() + START_TIMEOUT_S
    drafted = '{__name__=~"sglang.kvspec_drafted_tokens_total"}'
    count = f"count_over_time({drafted}[1m]) >= 2"
    while time.monotonic() < deadline:
        assert process.poll() is None, "Prometheus has ended: see prometheus.log"
        try:
            if ask(url, count):
                return
        except requests.ConnectionError:
            pass
        time.sleep(0.2)
    targets = requests.get(f"{url}/api/v1/targets", timeout=30).json()["data"]["activeTargets"]
    errors = [target["lastError"] for target in targets]
    raise AssertionError(f"not scraped twice in {START_TIMEOUT_S:g} s: {errors}")
