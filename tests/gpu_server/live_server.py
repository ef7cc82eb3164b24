"""One server of the fleet, for prompts of token ids."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from serving.live_server import kvspec_of

from kvspec_testkit.servers.server_process import ServerProcess

REQUEST_TIMEOUT_S = 300.0
FLUSH_TIMEOUT_S = 30.0
POLL_S = 0.05

Answers = list[list[int]]


class LiveServer(ServerProcess):
    """Server that answers greedily. hits: hit tokens in each tier, as answers report them.
    num_retractions: retractions of all requests so far."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hits: Counter[str] = Counter()
        self.num_retractions = 0

    def ask(self, prompts: Sequence[list[int]], new_tokens: int, *, at_once: bool) -> Answers:
        """Return greedy answers. All prompts are sent at once, or one after the other."""
        params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        bodies = [{"input_ids": prompt, "sampling_params": params} for prompt in prompts]
        return [list(answer["output_ids"]) for answer in self.send(bodies, at_once=at_once)]

    def send(
        self, bodies: Sequence[dict[str, Any]], *, at_once: bool = True
    ) -> list[dict[str, Any]]:
        """Return the answers to requests of /generate."""
        with ThreadPoolExecutor(len(bodies) if at_once else 1) as pool:
            answers = list(pool.map(lambda body: self.post("/generate", json=body), bodies))
        for answer in answers:
            meta = answer["meta_info"]
            self.hits += Counter(meta["kvspec"]["hit_tokens"])
            self.num_retractions += int(meta.get("num_retractions") or 0)
        return answers

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Post, and return the JSON of the reply. Raises requests.HTTPError on an error status."""
        reply = requests.post(f"{self.base_url}{path}", timeout=REQUEST_TIMEOUT_S, **body)
        reply.raise_for_status()
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        return dict(reply.json()) if is_json else {}

    def flush(self) -> None:
        """Flush the prefix cache, once all requests that have been answered have ended."""
        self.post("/flush_cache", params={"timeout": FLUSH_TIMEOUT_S})

    def report(self) -> dict[str, Any]:
        """Return the kvspec section of /server_info."""
        reply = requests.get(f"{self.base_url}/server_info", timeout=REQUEST_TIMEOUT_S)
        reply.raise_for_status()
        return kvspec_of(reply.json())

    def remote_counters(self) -> dict[str, int]:
        """Return the counters of requests to the prefix server."""
        return dict(self.report()["prefix_tiers"]["remote"]["counters"])

    def wait_until_live(self) -> None:
        """Block until there is a link to the prefix server."""
        self.wait(lambda report: report["prefix_tiers"]["remote"]["is_live"])

    def wait_until_spilled(self) -> None:
        """Block until nothing is on its way to disk or to the prefix server."""

        def is_spilled(report: dict[str, Any]) -> bool:
            tiers = report["prefix_tiers"]
            found = [tiers[name] for name in ("disk", "remote") if name in tiers]
            return not any(tier["waiting_bytes"] for tier in found)

        self.wait(is_spilled)

    def wait(self, is_so: Callable[[dict[str, Any]], bool]) -> None:
        """Block until the report is as wanted."""
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while not is_so(report := self.report()):
            assert time.monotonic() < deadline, f"timed out, the last report: {report}"
            time.sleep(POLL_S)
