"""Server with prefix tiers, for prompts of token ids."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from kvspec_testkit.servers.server_process import CPU_ARGUMENTS, ServerProcess
from serving.live_server import kvspec_of

START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 300.0
POLL_S = 0.05
FLUSH_TIMEOUT_S = 30.0
# Several servers share a GPU. While one measures the free memory, others allocate far less than
# this fraction.
ON_GPU = (
    *("--dtype=bfloat16", "--mem-fraction-static=0.3", "--random-seed=0"),
    *("--sampling-backend=pytorch", "--disable-prefill-cuda-graph"),
)


class TierServer(ServerProcess):
    """Server with prefix tiers; a context manager, as its base class is. hits: hit tokens in each
    tier, as answers report them."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        pool_tokens: int,
        *,
        on_gpu: bool,
        log_path: Path,
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(
            (
                *(ON_GPU if on_gpu else CPU_ARGUMENTS),
                *("--kvspec", "--grammar-backend=none", "--page-size=64"),
                *("--max-running-requests=8", f"--max-total-tokens={pool_tokens}", *arguments),
            ),
            log_path=log_path,
            environment=environment,
        )
        self.name = name
        self.hits: Counter[str] = Counter()

    def wait_healthy(
        self, timeout_s: float = START_TIMEOUT_S, on_wait: Callable[[float], None] | None = None
    ) -> float:
        return super().wait_healthy(timeout_s, on_wait)

    def ask(
        self, prompts: Sequence[list[int]], new_tokens: int, *, at_once: bool
    ) -> list[list[int]]:
        """Return greedy answers. All prompts are sent at once, or one after the other."""
        with ThreadPoolExecutor(len(prompts) if at_once else 1) as pool:
            answers = list(pool.map(lambda prompt: self._answer(prompt, new_tokens), prompts))
        self.hits += sum((hits for _, hits in answers), Counter())
        return [tokens for tokens, _ in answers]

    def _answer(self, prompt: list[int], new_tokens: int) -> tuple[list[int], Counter[str]]:
        params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        reply = requests.post(
            f"{self.base_url}/generate",
            json={"input_ids": prompt, "sampling_params": params},
            timeout=REQUEST_TIMEOUT_S,
        )
        reply.raise_for_status()
        answer = reply.json()
        return list(answer["output_ids"]), Counter(answer["meta_info"]["kvspec"]["hit_tokens"])

    def report(self) -> dict[str, Any]:
        reply = requests.get(f"{self.base_url}/server_info", timeout=REQUEST_TIMEOUT_S)
        reply.raise_for_status()
        return kvspec_of(reply.json())

    def flush(self) -> None:
        """Flush the prefix cache, once all requests that have been answered have ended."""
        url, params = f"{self.base_url}/flush_cache", {"timeout": FLUSH_TIMEOUT_S}
        requests.post(url, params=params, timeout=REQUEST_TIMEOUT_S).raise_for_status()

    def remote_counters(self) -> dict[str, int]:
        """Return the counters of requests to the prefix server."""
        return dict(self.report()["prefix_tiers"]["remote"]["counters"])

    def wait_until_live(self) -> None:
        """Block until there is a link to the prefix server."""
        self._wait(lambda tiers: tiers["remote"]["is_live"])

    def wait_until_spilled(self) -> None:
        """Block until nothing is on its way to disk or to the prefix server."""
        self._wait(
            lambda tiers: (
                not any(
                    tiers[name]["waiting_bytes"] for name in ("disk", "remote") if name in tiers
                )
            )
        )

    def _wait(self, is_so: Callable[[dict[str, Any]], bool]) -> None:
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while not is_so(self.report()["prefix_tiers"]):
            assert time.monotonic() < deadline, (
                f"{self.name}: timed out after {REQUEST_TIMEOUT_S:.0f} s, prefix tiers: "
                f"{self.report()['prefix_tiers']}"
            )
            time.sleep(POLL_S)
