"""One server under test: its start, its reports, and its measurement point by point."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import requests
from acceptance.report import versions

from kvspec_testkit.servers.server_process import ServerProcess
from serving import client, compiled
from serving.decode_rate import decode_rate, rate_of_passes
from serving.link_watch import LinkWatch
from serving.machine import hbm_used_gib
from serving.points import MAX_CONCURRENCY, Point
from serving.prompts import write_texts
from serving.records import Record

_REQUEST_TIMEOUT_S = 120.0
_FLUSH_TIMEOUT_S = 60.0
_WATCH_TIMEOUT_S = 5.0
_WARM_UP_PROMPT, _WARM_UP_OUTPUT = 300, 32
# Tokens of a cached prompt that may be computed again: a cached prefix ends at a page.
_MOST_UNCACHED = 256


class LiveServer:
    """Context manager of one server, which is stopped at the end in any case.

    facts: fields of a Record that are the same for every point of this server. deadline:
    time.monotonic() at which measuring ends with client.OutOfTime.
    """

    def __init__(
        self,
        process: ServerProcess,
        folder: Path,
        scratch: Path,
        deadline: float,
        facts: Mapping[str, Any],
    ) -> None:
        self._process = process
        self._folder = folder
        self._scratch = scratch
        self._deadline = deadline
        self._facts = dict(facts)
        self._compiled: frozenset[Path] = frozenset()

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stop()

    @property
    def base_url(self) -> str:
        return self._process.base_url

    @property
    def facts(self) -> dict[str, Any]:
        """Return the given facts, and start_s once the server has started."""
        return dict(self._facts)

    def start(self, timeout_s: float) -> float:
        """Launch the server, wait until it is healthy, and warm it up. Return the seconds that the
        start took."""
        if self.left_s() <= 0:
            raise client.OutOfTime
        begun = time.monotonic()
        self._process.start()
        # Import while the server imports the same modules: both mostly read the same files.
        client.load_bench_serving()
        try:
            self._process.wait_healthy(min(timeout_s, max(self.left_s(), 0)))
        except Exception:
            if self.left_s() <= 0:
                raise client.OutOfTime from None
            raise
        taken = time.monotonic() - begun
        self._facts["start_s"] = round(taken, 1)
        self._compiled = compiled.compiled_kernels()
        self._warm_up()
        return taken

    def resolve(self, point: Point, output_len: int, max_running: int) -> Point:
        """Return the point with a number in place of MAX_CONCURRENCY: as many requests as fit into
        the KV cache at once, up to max_running."""
        if point.concurrency != MAX_CONCURRENCY:
            return point
        # Each request needs a page more, because its answer ends within a page.
        each = point.prompt_len(output_len) + output_len + 64
        fit = self.info()["max_total_num_tokens"] // each
        return Point(point.model, point.context_len, max(1, min(fit, max_running)))

    def measure(
        self,
        point: Point,
        output_len: int,
        passes: Sequence[str],
        waves: int,
        *,
        real_text: bool,
        is_cached: bool = False,
        least_requests: int = 1,
    ) -> Record:
        """Run `passes`, out of "end_to_end" and "decode", on a cache that is empty at first.

        end_to_end sends `waves` prompts per slot. decode sends one prompt per slot twice, the first
        time for one output token, so that the second time only decodes. is_cached: a decode pass of
        this point was the last that this server ran, so its prompts are cached, and decode sends
        them once. least_requests: decode goes on sending them until so many requests have decoded.
        Raises BenchError.
        """
        prompt_len = point.prompt_len(output_len)
        found: dict[str, Any] = {}
        texts = None
        if real_text:
            texts = self._scratch / f"{point.label}.jsonl"
            # All systems get the same texts, so the first one writes the file.
            if not texts.exists():
                write_texts(point.model, waves * point.concurrency, prompt_len, point.seed, texts)
        if not is_cached:
            self.flush()
        before = self._kvspec()
        watch: LinkWatch | None = None
        if "end_to_end" in passes:
            result = self._run(point, prompt_len, output_len, waves, texts)
            found["end_to_end"] = client.summary(result)
        if "decode" in passes:
            if not is_cached:
                self._run(point, prompt_len, 1, 1, texts)
            # The timeout is short, because the watch asks a busy server again.
            ask = partial(self._kvspec, _WATCH_TIMEOUT_S)
            with LinkWatch(ask) if _has_link(before) else nullcontext() as watch:
                results = [
                    self._run(point, prompt_len, output_len, 1, texts)
                    for _ in range(-(-least_requests // point.concurrency))
                ]
            uncached = max(map(client.most_uncached, results))
            if uncached > _MOST_UNCACHED:
                _add_note(
                    found, f"decode pass dropped: {uncached} tokens of a prompt were not cached"
                )
            else:
                found["decode"] = client.summary(results[-1])
                rates = [decode_rate(result["ttfts"], result["itls"]) for result in results]
                found["decode_rate"] = rate_of_passes(rates) if all(rates) else None
        info = self.info()
        after = kvspec_of(info)
        counters = counters_between(before.get("counters", {}), after.get("counters", {}))
        busy: Mapping[str, Any] = after
        if _has_link(before):
            counters["bytes_fetched"] = after["bytes_fetched"] - before["bytes_fetched"]
        if watch is not None:
            busy = watch.busiest or after
            if watch.num_missed:
                _add_note(found, f"{watch.num_missed} reports about the link are missing")
        if link := busy.get("link"):
            _add_note(found, link["reason"])
        return Record(
            model=point.model.name,
            context_len=point.context_len,
            concurrency=point.concurrency,
            prompt_len=prompt_len,
            output_len=output_len,
            counters=counters,
            draft_iter_ms=draft_iter_ms(busy, point.concurrency),
            timing=timing_of(busy, point.concurrency),
            max_total_num_tokens=info.get("max_total_num_tokens"),
            hbm_gib=hbm_used_gib(),
            compiled=self._newly_compiled(),
            versions={**versions(), "sglang": info["version"]},
            **self._facts,
            **found,
        )

    def _run(
        self, point: Point, prompt_len: int, output_len: int, waves: int, texts: Path | None
    ) -> dict[str, Any]:
        command = client.arguments(
            self.base_url,
            self._folder,
            prompt_len=prompt_len,
            output_len=output_len,
            num_prompts=waves * point.concurrency,
            concurrency=point.concurrency,
            seed=point.seed,
            texts=texts,
        )
        return client.run(command, self.left_s())

    def _newly_compiled(self) -> list[str]:
        before, self._compiled = self._compiled, compiled.compiled_kernels()
        return compiled.names(self._compiled - before)

    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return self._deadline - time.monotonic()

    def _warm_up(self) -> None:
        """Send four short requests at once, with tokens that no measured prompt begins with."""
        prompts = [[3 + n] * _WARM_UP_PROMPT for n in range(4)]
        params = {"temperature": 0, "max_new_tokens": _WARM_UP_OUTPUT, "ignore_eos": True}
        self.post("/generate", json={"input_ids": prompts, "sampling_params": params})

    def flush(self) -> None:
        """Empty the prefix cache. Raises BenchError if requests run."""
        self.post("/flush_cache", params={"timeout": _FLUSH_TIMEOUT_S})

    def post(self, path: str, **body: Any) -> None:
        """Send a POST request. Raises BenchError with the server's answer if it is no success."""
        reply = requests.post(f"{self.base_url}{path}", timeout=_REQUEST_TIMEOUT_S, **body)
        if not reply.ok:
            raise client.BenchError(f"{path} answered {reply.status_code}: {reply.text[:300]}")

    def info(self, timeout_s: float = _REQUEST_TIMEOUT_S) -> dict[str, Any]:
        """Return the content of /server_info."""
        reply = requests.get(f"{self.base_url}/server_info", timeout=timeout_s)
        reply.raise_for_status()
        return dict(json.loads(reply.text))

    def _kvspec(self, timeout_s: float = _REQUEST_TIMEOUT_S) -> dict[str, Any]:
        return kvspec_of(self.info(timeout_s))


def kvspec_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kvspec section of /server_info, empty on plain SGLang."""
    return dict(info["internal_states"][0].get("kvspec", {}))


def _add_note(found: dict[str, Any], note: str) -> None:
    found["note"] = "; ".join(filter(None, (found.get("note"), note)))


def _has_link(report: Mapping[str, Any]) -> bool:
    """Return True if residuals of this server may be in host memory."""
    return bool(report.get("pools", {}).get("residual_store_pages"))


def draft_iter_ms(report: Mapping[str, Any], concurrency: int) -> float | None:
    """Return the time of a draft step in which all requests take part, or None without one."""
    by_batch = report.get("timing", {}).get("draft_iter_ms", {})
    return by_batch.get(str(concurrency))


def timing_of(report: Mapping[str, Any], concurrency: int) -> dict[str, float]:
    """Return the times of a kvspec section, in ms. Of draft steps, only those of all requests at
    once are included."""
    timing = dict(report.get("timing", {}))
    step_ms = draft_iter_ms(report, concurrency)
    timing.pop("draft_iter_ms", None)
    return timing if step_ms is None else timing | {"draft_iter_ms": step_ms}


def counters_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the increases of counters, and of each entry of the histogram of accept lengths. Means
    cannot be subtracted, and are left out."""
    rise: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, Mapping):
            rise[name] = counters_between(before.get(name, {}), value)
        elif isinstance(value, int) and value != before.get(name, 0):
            rise[name] = value - before.get(name, 0)
    return rise
