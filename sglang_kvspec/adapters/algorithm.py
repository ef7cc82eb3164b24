"""KVSPEC as a speculative algorithm of SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_kvspec.adapters.activation import ALGORITHM_NAME
from sglang_kvspec.adapters.compat.speculative import CustomSpecAlgo, SpeculativeAlgorithm


class KVSpecAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """SGLang's base class with the three methods that its scheduler calls and 0.5.17 lacks."""

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def build_disagg_draft_input(self, batch: Any, *args: Any) -> Any:
        """Return the states of requests that begin, or resume, to decode on a decode server. Other
        arguments differ by release."""
        from sglang_kvspec.adapters.transfer.decoding import admit

        return admit(batch)

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from sglang_kvspec.adapters.compat.future_map import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )


_is_registered = False


def register(verify_hooks: Callable[[], None]) -> None:
    """Register KVSPEC with SGLang, once a process.

    verify_hooks: raises HookError where a hook did not apply; called before a worker is made.
    """
    global _is_registered
    if _is_registered:
        return
    _is_registered = True

    # SGLang warns about an algorithm without support for its overlap, which KVSpec turns off.
    @SpeculativeAlgorithm.register(
        ALGORITHM_NAME, supports_overlap=True, spec_class=KVSpecAlgorithm
    )
    def create_worker(server_args: Any) -> type:
        from sglang_kvspec.adapters.worker import KVSpecWorker

        verify_hooks()
        return KVSpecWorker
