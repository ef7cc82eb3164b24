"""The decode server's side: SGLang's KV manager and receivers over Arrivals."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import requests
from sglang.srt.disaggregation.base.conn import BaseKVReceiver, KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError, PrefillServerInfo
from sglang.srt.environ import envs

from sglang_kvspec.adapters.transfer.peers import Serving, write_fields
from sglang_kvspec.adapters.transfer.report import link_report
from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.runtime.disaggregation.arrivals import Arrivals
from sglang_kvspec.transport import LinkState, Receiver, ReceiverLoop, ZmqPort

logger = logging.getLogger(__name__)

_QUERY_TIMEOUT_S = 2.0
# A prefill server that does not answer is asked where it is at most so often.
_QUERY_PERIOD_S = 1.0


class DecodeManager:
    """Owns a link to every prefill server, by the address of its bootstrap server."""

    def __init__(self, kv_args: Any, server_args: Any, serving: Serving) -> None:
        self.kv_args = kv_args
        self._serving = serving
        self._identity = serving.identity()
        self._keys = serving.keys()
        self.arrivals = Arrivals(
            serving.kv, serving.wire(), serving.handovers(kv_args), mode=serving.config.transfer
        )
        serving.pool.freed_listeners.append(self.arrivals.release)
        self.waiting_timeout_s = float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())
        # SGLang looks up here what is known of a prefill server.
        self.prefill_info_table: dict[str, PrefillServerInfo] = {}
        self._links: dict[str, tuple[str, ReceiverLoop]] = {}
        self._asked_s: dict[str, float] = {}
        if serving.config.is_lossy:
            logger.warning(
                "KVSpec: KV arrives by --kvspec-transfer %s, which loses some of it: answers are "
                "not those of full precision, and are not verified",
                serving.config.transfer,
            )

    def register_to_bootstrap(self) -> None:
        """Prefill servers do."""

    def report(self) -> dict[str, Any]:
        return {addr: link_report(loop.counters()) for addr, (_, loop) in self._links.items()}

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Ask a prefill server once what it is. Raises TransportError where it cannot be one of
        ours; SGLang asks again where this says False."""
        if bootstrap_addr in self.prefill_info_table:
            return True
        found = self._query(bootstrap_addr, rank=-1)
        if found is None:
            return False
        self.prefill_info_table[bootstrap_addr] = PrefillServerInfo(**found)
        return True

    def link_to(self, bootstrap_addr: str) -> ReceiverLoop:
        """Raises TransportError where the server cannot be found."""
        known = self._links.get(bootstrap_addr)
        if known is not None and (_is_live(known[1]) or not self._may_ask(bootstrap_addr)):
            return known[1]
        # New here, or silent: it may have been started anew, and listen elsewhere.
        found = self._query(bootstrap_addr, rank=0)
        if found is None:
            if known is not None:
                return known[1]
            raise TransportError(f"the prefill server at {bootstrap_addr} does not answer")
        address = f"tcp://{found['rank_ip']}:{found['rank_port']}"
        if known is not None and known[0] == address and known[1].refusal is None:
            return known[1]
        port = ZmqPort(address, bind=False, keys=self._keys, identity=os.urandom(8))
        loop = ReceiverLoop(Receiver(port, self._identity), on_news=self._serving.news.set)
        self._links[bootstrap_addr] = (address, loop)
        if known is not None:
            known[1].close()
            self.arrivals.fail_all_of(known[1], f"the prefill server at {known[0]} is gone")
        return loop

    def pump(self) -> None:
        for address, (_, loop) in list(self._links.items()):
            try:
                self.arrivals.pump(loop)
            except TransportError as error:
                # Its thread is over: the next request dials anew.
                logger.error("KVSpec: the link to %s: %s", address, error)
                del self._links[address]
                self.arrivals.fail_all_of(loop, str(error))

    def submit_prefill_recompute(self, kv_receiver: Any, payload: dict[str, Any]) -> None:
        """SGLang's `pause_generation(mode="retract")` would have prompts computed again."""
        kv_receiver.give_up("KVSpec's decode servers cannot have KV computed again")

    def _may_ask(self, bootstrap_addr: str) -> bool:
        now_s = time.monotonic()
        if now_s - self._asked_s.get(bootstrap_addr, -_QUERY_PERIOD_S) < _QUERY_PERIOD_S:
            return False
        self._asked_s[bootstrap_addr] = now_s
        return True

    def _query(self, bootstrap_addr: str, rank: int) -> dict[str, Any] | None:
        """rank -1: of the server; 0: of its one rank."""
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        try:
            reply = requests.get(
                f"http://{bootstrap_addr}/route",
                params=dict.fromkeys(names, rank),
                timeout=_QUERY_TIMEOUT_S,
            )
        except requests.RequestException as error:
            logger.warning("KVSpec: no answer from %s: %s", bootstrap_addr, error)
            return None
        if reply.status_code != 200:
            logger.warning("KVSpec: %s answers %s", bootstrap_addr, reply.text)
            return None
        found: dict[str, Any] = reply.json()
        return found


def _is_live(loop: ReceiverLoop) -> bool:
    return loop.state is LinkState.LIVE


class KVSpecReceiver(BaseKVReceiver):  # type: ignore[misc]
    """One request's KV on its way from a prefill server, as SGLang asks for it. Over once all
    anchors are there; residuals come later, and the worker knows of them."""

    require_staging = False

    def __init__(
        self, mgr: DecodeManager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        assert bootstrap_room is not None, "SGLang gives every request a room"
        self.kv_mgr = mgr
        self._address, self._room = bootstrap_addr, bootstrap_room
        self.conclude_state: int | None = None
        self._failure: str | None = None
        self._link: ReceiverLoop | None = None
        self._aux_index: int | None = None
        self._is_expected = False

    def init(self, prefill_dp_rank: int) -> None:
        try:
            self._link = self.kv_mgr.link_to(self._address)
        except TransportError as error:
            self.kv_mgr.prefill_info_table.pop(self._address, None)
            self.give_up(str(error))

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
    ) -> None:
        """Pages of the whole prompt have been allocated: have it sent."""
        assert self._link is not None
        assert not decode_prefix_len, "a decode server keeps no prefixes"
        self._aux_index = aux_index
        pages = [int(page) for page in kv_indices]
        try:
            self.kv_mgr.arrivals.expect(
                self._room, self._link, pages, self.kv_mgr.waiting_timeout_s
            )
        except (ValueError, TransportError) as error:
            self.give_up(str(error))
        else:
            self._is_expected = True

    def poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        if self._link is None:
            return KVPoll.Bootstrapping
        if not self._is_expected:
            return KVPoll.WaitingForInput
        self.kv_mgr.pump()
        arrivals = self.kv_mgr.arrivals
        if (failure := arrivals.failure(self._room)) is not None:
            self.give_up(failure)
            return KVPoll.Failed
        if not arrivals.is_draftable(self._room):
            return KVPoll.Transferring
        assert self._aux_index is not None
        write_fields(self.kv_mgr.kv_args, self._aux_index, arrivals.fields(self._room))
        self.conclude_state = KVPoll.Success
        return KVPoll.Success

    def give_up(self, reason: str) -> None:
        self._failure = self._failure or reason
        self.conclude_state = KVPoll.Failed

    def failure_exception(self) -> None:
        raise KVTransferError(self._room, self._failure or "unknown")

    def clear(self) -> None:
        if self.conclude_state != KVPoll.Success and self._is_expected:
            self.kv_mgr.arrivals.drop(self._room, self._failure or "the decode server gave it up")

    def abort(self) -> None:
        self.give_up("Aborted by AbortReq.")
