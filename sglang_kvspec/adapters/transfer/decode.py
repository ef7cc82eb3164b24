"""The decode server's side: SGLang's KV manager and receivers over Arrivals."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from msgspec.structs import replace

from sglang_kvspec.adapters.compat.environ import envs
from sglang_kvspec.adapters.compat.transfer import (
    BaseKVManager,
    BaseKVReceiver,
    KVPoll,
    PrefillServerInfo,
)
from sglang_kvspec.adapters.transfer.directory import Answer, Asker, Directory, query_route
from sglang_kvspec.adapters.transfer.links import PrefillLinks
from sglang_kvspec.adapters.transfer.peers import (
    WEIGHTS_CHANGED,
    Serving,
    failed,
    write_fields,
    wrong_room,
)
from sglang_kvspec.adapters.transfer.report import link_report, live_counters
from sglang_kvspec.core.errors import ConfigError, TransportError
from sglang_kvspec.runtime.disaggregation.arrivals import Arrivals
from sglang_kvspec.transport import JoinedLink, Receiver, ReceiverLoop, ZmqPort
from sglang_kvspec.transport.counters import LinkCounters

logger = logging.getLogger(__name__)

# Seconds that a request waits for a link to its prefill server, which may be restarting.
CONNECT_TIMEOUT_S = 20.0


class DecodeManager(BaseKVManager):  # type: ignore[misc]
    """SGLang's KV manager of a decode rank. Owns a link to every prefill server, by the address of
    its bootstrap server. A link joins those ranks of the server that have this rank's KV heads."""

    def __init__(self, kv_args: Any, server_args: Any, serving: Serving) -> None:
        self.kv_args = kv_args
        self._serving = serving
        self._identity = serving.identity()
        self._keys = serving.keys()
        if self._keys is not None and len(self._keys.peers) != 1:
            raise ConfigError(
                f"--kvspec-transfer-keys {serving.config.transfer_keys}: peers/*.key must hold "
                "one key on a decode server, which all prefill servers share, got "
                f"{len(self._keys.peers)}"
            )
        self.arrivals = Arrivals(
            serving.kv,
            serving.wire(),
            serving.handovers(kv_args),
            mode=serving.config.transfer,
            ranks=serving.ranks,
        )
        serving.pool.freed_listeners.append(self.arrivals.release)
        self.waiting_timeout_s = float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())
        asker = Asker(serving.ranks.rank, serving.ranks.size, serving.kv.geometry.num_kv_heads)
        self.links = PrefillLinks(
            Directory(serving.news.set, partial(query_route, asker=asker)),
            self._dial,
            is_used=self.arrivals.is_used,
            on_gone=self.arrivals.fail_all_of,
        )
        # Why requests are refused from now on; None while they are not.
        self.refusal: str | None = None
        # SGLang looks up prefill servers in this table.
        self.prefill_info_table = _AsManyRanks(serving)
        if serving.config.is_lossy:
            logger.warning(
                "KVSpec: --kvspec-transfer %s is lossy: answers may differ from those of full "
                "precision, and are not verified",
                serving.config.transfer,
            )

    def register_to_bootstrap(self) -> None:
        """Do nothing: only prefill servers register."""

    def report(self) -> dict[str, Any]:
        return {addr: link_report(loop) for addr, loop in self.links.by_address().items()}

    def link_counters(self) -> list[LinkCounters]:
        return live_counters(self.links.loops())

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Return True: a prefill server describes itself in the handshake."""
        return True

    def pump(self) -> None:
        for loop in self.links.loops():
            try:
                self.arrivals.pump(loop)
            except TransportError as error:
                # The loop's thread has ended: the next request dials again.
                logger.error("KVSpec: %s", error)
                self.links.drop(loop, str(error))

    def _dial(self, answer: Answer) -> JoinedLink:
        with ExitStack() as dialled:
            loops = [
                dialled.enter_context(self._dial_rank(address, rank, answer.part))
                for rank, address in enumerate(answer.addresses, answer.first_rank)
            ]
            # All dials worked: keep the loops open. After a failed dial, the stack closes them.
            dialled.pop_all()
        return JoinedLink(loops)

    def _dial_rank(self, address: str, rank: int, part: tuple[int, int]) -> ReceiverLoop:
        port = ZmqPort(address, bind=False, keys=self._keys, identity=os.urandom(8))
        receiver = Receiver(port, replace(self._identity, rank=rank, part=part))
        return ReceiverLoop(receiver, on_news=self._serving.news.set)

    def weights_will_change(self) -> None:
        """Fail all transfers: KV of two sets of weights must not meet in one request."""
        self.refusal = WEIGHTS_CHANGED.format("decode")
        self.arrivals.fail_all(self.refusal)

    def is_token(self, first: bytes) -> bool:
        """Return True if SGLang's metadata of a first token names a token of the vocabulary. Any
        other number would end the server."""
        token = int.from_bytes(first[:4], sys.byteorder, signed=True)
        return 0 <= token < int(self._serving.model_config.vocab_size)

    @staticmethod
    def is_of_room(last: bytes, room: int) -> bool:
        """Return True if SGLang's metadata belongs to this room. SGLang's own check would make one
        rank alone give the request up."""
        return int.from_bytes(last[:8], sys.byteorder) == room

    def submit_prefill_recompute(self, kv_receiver: Any, payload: dict[str, Any]) -> None:
        """Refuse what SGLang's `pause_generation(mode="retract")` asks for: to compute KV again."""
        kv_receiver.give_up("a decode server of KVSpec cannot recompute KV")


class _AsManyRanks:
    """Table that tells SGLang that every prefill server has as many ranks as this server. SGLang
    wants to know, but the directory and the handshake decide which ranks send."""

    def __init__(self, serving: Serving) -> None:
        self._info = PrefillServerInfo(
            attn_tp_size=serving.ranks.size,
            attn_cp_size=1,
            dp_size=1,
            pp_size=1,
            page_size=serving.kv.geometry.page_size,
            kv_cache_dtype=None,
            follow_bootstrap_room=True,
        )

    def get(self, bootstrap_addr: str) -> PrefillServerInfo:
        return self._info


class KVSpecReceiver(BaseKVReceiver):  # type: ignore[misc]
    """SGLang's receiver of one request's KV from a prefill server. Done once all anchors have
    arrived. Residuals may come later, and the worker waits for them."""

    require_staging = False

    def __init__(
        self, mgr: DecodeManager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        assert bootstrap_room is not None, "SGLang must give every request a bootstrap room"
        self.kv_mgr = mgr
        self._address, self._room = bootstrap_addr, bootstrap_room
        self.conclude_state: int | None = None
        self._failure: str | None = None
        self._link: JoinedLink | None = None
        self._begun_s: float | None = None
        self._aux_index: int | None = None
        self._is_expected = False
        if (wrong := wrong_room(bootstrap_room) or mgr.refusal) is not None:
            self.give_up(wrong)

    def init(self, prefill_dp_rank: int) -> None:
        if self.conclude_state is not None:
            return
        self._begun_s = time.monotonic()
        self._find_link()

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = "device",
    ) -> None:
        """Ask for the KV of a prompt, now that SGLang has allocated pages for all of it.

        destination: since 0.5.21 the memory of those pages.
        """
        assert self._link is not None
        assert destination == "device", "a decode server receives KV into its pool"
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
        if self.conclude_state == KVPoll.Failed:
            return KVPoll.Failed
        if self._link is None:
            return self._find_link()
        if not self._is_expected:
            return KVPoll.WaitingForInput
        self.kv_mgr.pump()
        arrivals = self.kv_mgr.arrivals
        # Checked after success, too: the request may still wait for other ranks.
        if (failure := arrivals.failure(self._room)) is not None:
            self.give_up(failure)
            return KVPoll.Failed
        if self.conclude_state is not None:
            return KVPoll.Success
        if not arrivals.is_draftable(self._room):
            return KVPoll.Transferring
        fields = arrivals.fields(self._room)
        if not self.kv_mgr.is_token(fields[0]):
            self.give_up("the prefill server sent a first token outside the vocabulary")
            return KVPoll.Failed
        if not self.kv_mgr.is_of_room(fields[-1], self._room):
            self.give_up("the prefill server sent a first token of another request")
            return KVPoll.Failed
        assert self._aux_index is not None
        write_fields(self.kv_mgr.kv_args, self._aux_index, fields)
        self.conclude_state = KVPoll.Success
        return KVPoll.Success

    def _find_link(self) -> int:
        """Look for a link to the prefill server, without a wait. Return the state of the poll."""
        if self._begun_s is None:
            return KVPoll.Bootstrapping
        links = self.kv_mgr.links
        try:
            self._link = links.live(self._address)
        except TransportError as error:
            self.give_up(str(error))
            return KVPoll.Failed
        if self._link is not None:
            return KVPoll.WaitingForInput
        if (waited_s := time.monotonic() - self._begun_s) > CONNECT_TIMEOUT_S:
            trouble = links.trouble(self._address)
            self.give_up(
                f"no link to the prefill server at {self._address} in {waited_s:.0f} s: {trouble}"
            )
            return KVPoll.Failed
        return KVPoll.Bootstrapping

    def give_up(self, reason: str) -> None:
        self._failure = self._failure or reason
        self.conclude_state = KVPoll.Failed

    def failure_exception(self) -> None:
        raise failed(self._room, self._failure)

    def clear(self) -> None:
        """Land the anchors of a request that has succeeded, or forget one that has failed. SGLang
        calls this when it takes over a request that succeeded on all ranks, or has ended one."""
        if self.conclude_state == KVPoll.Success:
            self.kv_mgr.arrivals.land_anchors(self._room)
        elif self._is_expected:
            reason = self._failure or "the decode server cancelled the request"
            self.kv_mgr.arrivals.drop(self._room, reason)

    def abort(self) -> None:
        self.give_up("Aborted by AbortReq.")
