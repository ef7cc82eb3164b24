"""The worker's part in transfers on a prefill or decode server: setup, reports and notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_kvspec.adapters.compat.runtime_context import get_serving
from sglang_kvspec.adapters.transfer.decoding import Decoding, keep_retracted
from sglang_kvspec.adapters.transfer.peers import Serving, install
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.runtime.disaggregation.metrics import TransferMetrics
from sglang_kvspec.runtime.ranks import Ranks


class DisaggregationRole:
    """Role of a prefill or a decode server. decoding: treatment of late KV on a decode server; None
    on a prefill server."""

    def __init__(
        self,
        config: KVSpecConfig,
        pool: Any,
        model_runner: Any,
        server_args: Any,
        ranks: Ranks,
    ) -> None:
        model = (model_runner.model_config, model_runner.model)
        self._serving = Serving(config, pool, *model, ranks)
        install(self._serving)
        self._serving.kv.records.warm_up()
        is_decode = server_args.disaggregation_mode == "decode"
        if is_decode:
            pool.keep_retracted = keep_retracted
        self.decoding = Decoding(self._serving) if is_decode else None
        self._metrics: TransferMetrics | None = None
        if server_args.enable_metrics and ranks.is_first:
            self._metrics = TransferMetrics(get_serving().served_model_name)

    def write_behind(self, join: Callable[[], None]) -> None:
        """Set join, which makes later writes wait for rounds that run beside the scheduler."""
        self._serving.join_rounds = join

    def publish(self) -> None:
        """Export the metrics of transfers. Called once an iteration."""
        if self._metrics is not None:
            drafts = 0 if self.decoding is None else self.decoding.drafts_on_anchors
            self._metrics.publish(self._serving.manager.link_counters, drafts)

    def report(self) -> dict[str, Any]:
        """Return the transfer section of /server_info."""
        links = {"links": self._serving.manager.report()}
        if self.decoding is None:
            return links
        return links | {"drafts_on_anchors": self.decoding.drafts_on_anchors}

    def note_prefill(self, reqs: Sequence[Any]) -> None:
        """Note prompts that are complete with a forward, and withhold KV of requests that failed in
        it."""
        for req in reqs:
            if req.inflight_middle_chunks <= 0:
                self.note_prompt(req)
            if req.to_finish is not None:
                self.withhold(req)

    def note_prompt(self, req: Any) -> None:
        """Note that a request's prompt is complete with this forward, on a prefill server."""
        self._serving.manager.departures.note_prompt(req.bootstrap_room, req.origin_input_ids)

    def withhold(self, req: Any) -> None:
        """Abort the transfer of a request that failed while it was prefilled: what was computed is
        not the KV that its decode server asked for."""
        self._serving.manager.departures.abort(req.bootstrap_room, req.to_finish.message)

    def weights_will_change(self) -> None:
        self._serving.manager.weights_will_change()
