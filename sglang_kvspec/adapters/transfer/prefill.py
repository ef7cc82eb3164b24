"""The prefill server's side: SGLang's KV manager and senders over Departures."""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

import requests

from sglang_kvspec.adapters.compat.environ import envs
from sglang_kvspec.adapters.compat.transfer import (
    BaseKVManager,
    BaseKVSender,
    KVPoll,
    KVTransferMetric,
)
from sglang_kvspec.adapters.transfer.peers import (
    WEIGHTS_CHANGED,
    Serving,
    failed,
    read_fields,
    wrong_room,
)
from sglang_kvspec.adapters.transfer.report import link_report, live_counters
from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.runtime.disaggregation.departures import NOT_NEEDED, Departures
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.transport import ForkedLink, Sender, SenderLoop, TokenBucket, ZmqPort
from sglang_kvspec.transport.counters import LinkCounters

logger = logging.getLogger(__name__)

# Bytes that a link of a given speed lets through at once after it was idle.
BURST_BYTES = 256 << 10
_REGISTER_TIMEOUT_S = 30.0


class PrefillManager(BaseKVManager):  # type: ignore[misc]
    """SGLang's KV manager of a prefill rank. Owns the port from which this rank's KV is sent."""

    def __init__(self, kv_args: Any, server_args: Any, serving: Serving) -> None:
        self.kv_args = kv_args
        config, ranks = serving.config, serving.ranks
        link = None
        if config.link_gbps is not None:
            rate = config.link_gbps * 1e9 / ranks.size
            link = TokenBucket(rate, BURST_BYTES, time.monotonic())
        port = ZmqPort(f"tcp://{config.transfer_host}:0", bind=True, keys=serving.keys())
        self.address = port.address
        self.loop = SenderLoop(
            Sender(port, serving.identity(), link=link), on_news=serving.news.set
        )
        self.departures = Departures(
            serving.kv,
            serving.wire(),
            ForkedLink(self.loop, harmless=[NOT_NEEDED]),
            serving.handovers(kv_args),
        )
        serving.pool.freed_listeners.append(self.departures.release)
        self.bootstrap_timeout_s = float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get())
        self.page_size = serving.kv.geometry.page_size
        # Why nothing is sent from now on; None while KV is sent.
        self.refusal: str | None = None
        self._register(server_args, ranks)

    def register_to_bootstrap(self) -> None:
        """Do nothing: the constructor has registered this rank."""

    def weights_will_change(self) -> None:
        """Abort all transfers: KV of two sets of weights must not meet in one request."""
        self.refusal = WEIGHTS_CHANGED.format("prefill")
        self.departures.abort_all(self.refusal)

    def report(self) -> dict[str, Any]:
        return link_report(self.loop)

    def link_counters(self) -> list[LinkCounters]:
        return live_counters([self.loop])

    def _register(self, server_args: Any, ranks: Ranks) -> None:
        """Tell SGLang's bootstrap server, which runs in another process of this server, where
        decode servers find this rank's port. Raises TransportError if that fails."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server_args.host, server_args.host)
        url = f"http://{host}:{server_args.disaggregation_bootstrap_port}/route"
        rank_host, _, rank_port = self.address.removeprefix("tcp://").rpartition(":")
        payload = {
            "attn_tp_size": ranks.size,
            "attn_tp_rank": ranks.rank,
            "attn_cp_size": 1,
            "attn_cp_rank": 0,
            "attn_dp_size": 1,
            "attn_dp_rank": 0,
            "pp_size": 1,
            "pp_rank": 0,
            "system_dp_size": 1,
            "system_dp_rank": 0,
            "rank_ip": rank_host,
            "rank_port": int(rank_port),
            "page_size": self.page_size,
            "kv_cache_dtype": server_args.kv_cache_dtype,
            "load_balance_method": "follow_bootstrap_room",
            "prefill_http_port": server_args.port,
        }
        deadline = time.monotonic() + _REGISTER_TIMEOUT_S
        while True:
            try:
                requests.put(url, json=payload, timeout=5).raise_for_status()
                return
            except requests.RequestException as error:
                if time.monotonic() > deadline:
                    raise TransportError(f"cannot register with {url}: {error}") from None
                # The bootstrap server's process starts while this one loads the model.
                time.sleep(0.2)


class KVSpecSender(BaseKVSender):  # type: ignore[misc]
    """SGLang's sender of one request's KV to a decode server.

    num_last_tokens: tokens in the pages that the last call of send() hands over, which the hook
    chunk_tokens sets until 0.5.16.
    """

    num_last_tokens: int | None = None

    def __init__(
        self, mgr: PrefillManager, bootstrap_addr: str, bootstrap_room: int, **unused: Any
    ) -> None:
        """unused: ranks of prefill and decode servers, which differ by release. SGLang names all
        arguments."""
        self.kv_mgr = mgr
        self._room = bootstrap_room
        self._num_pages = self._num_given = 0
        self._aux_index: int | None = None
        self._failure = wrong_room(bootstrap_room)
        self._owns_room = False
        self._begun_s = time.monotonic()
        self._metric = KVTransferMetric()
        if self._failure is None:
            self._take_room()

    def _take_room(self) -> None:
        departures, refusal = self.kv_mgr.departures, self.kv_mgr.refusal
        try:
            departures.add(self._room)
        except ValueError as error:
            self._failure = str(error)
            return
        self._owns_room = True
        # SGLang does not tell the sender when it drops a request that is aborted before it runs.
        self._dropped = weakref.finalize(self, departures.forget, self._room)
        self._dropped.atexit = False
        if refusal is not None:
            departures.abort(self._room, refusal)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Set num_kv_indices, the pages that will be sent, and aux_index, where SGLang puts the
        request's metadata."""
        self._num_pages, self._aux_index = num_kv_indices, aux_index

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        """Send the next pages of the prompt. Its last page goes with SGLang's metadata, and is the
        only one that may be partial.

        num_kv_tokens: tokens in these pages; until 0.5.16 num_last_tokens stands for it.
        """
        if self._failure is not None:
            return
        departures, pages = self.kv_mgr.departures, [int(page) for page in kv_indices]
        # Counted here: SGLang also hands over pages of a request that ended on this rank alone.
        self._num_given += len(pages)
        if self._num_given < self._num_pages:
            departures.send(self._room, pages)
            return
        assert self._aux_index is not None
        num_tokens = self.num_last_tokens if num_kv_tokens is None else num_kv_tokens
        assert num_tokens is not None
        num_tail = num_tokens - (len(pages) - 1) * self.kv_mgr.page_size
        fields = read_fields(self.kv_mgr.kv_args, self._aux_index)
        departures.send_last(self._room, pages, num_tail, fields)

    def poll(self) -> int:
        if self._failure is None:
            self.kv_mgr.departures.pump()
            departure = self.kv_mgr.departures.of(self._room)
            waited_s = time.monotonic() - self._begun_s
            if departure.ended:
                self._failure = departure.ended
            elif departure.ended is not None:
                return self._succeed(departure)
            elif departure.num_sent:
                return KVPoll.Transferring
            elif departure.is_open:
                return KVPoll.WaitingForInput
            elif waited_s > self.kv_mgr.bootstrap_timeout_s:
                self._failure = (
                    f"no decode server asked for the KV of the request in {waited_s:.0f} s"
                )
            else:
                return KVPoll.Bootstrapping
        return KVPoll.Failed

    def _succeed(self, departure: Any) -> int:
        self._metric = KVTransferMetric(
            transfer_latency_s=departure.took_s, transfer_total_bytes=departure.num_bytes
        )
        if not departure.num_sent:
            # The decode server ended the request before anything was computed here.
            self._failure = "the decode server no longer needs the KV of the request"
            return KVPoll.Failed
        return KVPoll.Success

    def get_transfer_metric(self) -> KVTransferMetric:
        return self._metric

    def failure_exception(self) -> None:
        error = failed(self._room, self._failure)
        if error.is_from_another_rank and self._owns_room:
            # This rank had no failure: tell the receiver why the request ends nevertheless.
            self.kv_mgr.departures.abort(
                self._room, "another rank of the prefill server cancelled the request"
            )
        self.clear()
        raise error

    def clear(self) -> None:
        if self._owns_room:
            self._dropped()
            self._owns_room = False

    def abort(self) -> None:
        self._failure = self._failure or "Aborted by AbortReq."
        if self._owns_room:
            self.kv_mgr.departures.abort(self._room, "the prefill server cancelled the request")
