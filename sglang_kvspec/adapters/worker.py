"""KVSPEC's speculative worker: turns SGLang's batches into rounds, and rounds into results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_kvspec.adapters import round_times
from sglang_kvspec.adapters.activation import config_of
from sglang_kvspec.adapters.assembly import (
    build_loop,
    make_repeats,
    schedule_of,
    share_parts,
)
from sglang_kvspec.adapters.compat.batches import GenerationBatchResult, LogitsProcessorOutput
from sglang_kvspec.adapters.compat.parallel_state import get_tp_group
from sglang_kvspec.adapters.compat.runtime_context import get_serving
from sglang_kvspec.adapters.compat.spec_worker import BaseSpecWorker
from sglang_kvspec.adapters.draft_view import view_of
from sglang_kvspec.adapters.draft_weights import draft_weights_report, make_draft_weights
from sglang_kvspec.adapters.logprobs import fill_logprobs
from sglang_kvspec.adapters.prefill import Prefill
from sglang_kvspec.adapters.ragged_forward import RaggedForward
from sglang_kvspec.adapters.ranks import device_of, ranks_of, ranks_on_a_machine
from sglang_kvspec.adapters.requests import fail_without_choice
from sglang_kvspec.adapters.spec_inputs import KVSpecDraftInput
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.loop import RoundResult
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.transfers import to_device
from sglang_kvspec.runtime.metrics import MetricsExporter, SpecCounters
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.remote_prefixes import RemoteMetrics
from sglang_kvspec.runtime.report import build_report, resolved_values
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.spec_sampler import SpecSampler, VerifyResult


class KVSpecWorker(BaseSpecWorker):  # type: ignore[misc]
    """Speculative worker that drafts and verifies with the target model itself.

    Invariants with SGLang: batch.seq_lens is the number of tokens with verified KV. The pending
    token follows them. Slots for drafts are reserved behind them, and persist until seq_lens moves.
    """

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any, ps: Any = None
    ) -> None:
        """ps: ranks of this process, until 0.5.20; SGLang names all arguments."""
        super().__init__()
        config = config_of(server_args)
        assert config is not None, "the KVSPEC worker was built without --kvspec"
        self.config = config
        self.server_args = server_args
        self._target_worker = target_worker
        self._draft_worker = None
        self.speculative_num_draft_tokens = config.max_draft_len + 1
        self.counters = SpecCounters()
        self.ranks: Ranks = ranks_of(get_tp_group())
        runner = target_worker.model_runner
        # Before SGLang sizes the KV pool, by the memory that is free then.
        self._draft_weights = make_draft_weights(config, server_args, runner, self.ranks)
        device = device_of(runner)
        self._sampler = SpecSampler(target_worker.random_seed, device)
        self._exporter: MetricsExporter | None = None
        self._remote_exporter: RemoteMetrics | None = None

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        """Make the parts that need SGLang's pools, which SGLang has made."""
        self.parts = share_parts(
            self.config,
            self.server_args,
            self._target_worker.model_runner,
            RaggedForward(self._target_worker),
            self._sampler,
            self.ranks,
            self.counters,
            req_to_token_pool,
            token_to_kv_pool_allocator,
            self._draft_weights,
        )
        if self.server_args.enable_metrics and self.ranks.is_first:
            model_name = get_serving().served_model_name
            self._exporter = MetricsExporter(model_name)
            if self.config.prefix_server is not None:
                self._remote_exporter = RemoteMetrics(model_name)

    def init_cuda_graphs(self) -> None:
        """Build the round loop. SGLang has loaded the model and its attention backend."""
        super().init_cuda_graphs()
        self.loop = build_loop(self.parts)
        self._prefill = Prefill(self.parts, self.loop, make_repeats(self.parts, self.loop))
        if self.parts.disaggregation is not None:
            self.parts.disaggregation.write_behind(self.loop.overlap.interrupt)

    def forward_batch_generation(
        self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None = None, **kwargs: Any
    ) -> GenerationBatchResult:
        if self.parts.draft_weights is not None:
            # Here, not before each draft: captured drafts replay without asking. The pre-launched
            # round was cancelled before the weights changed, so no draft runs now.
            self.parts.draft_weights.refresh()
        if batch.forward_mode.is_extend():
            result = self._prefill.run(batch)
        elif batch.forward_mode.is_idle():
            result = self._target_worker.forward_batch_generation(batch)
            result.next_draft_input = KVSpecDraftInput([])
        else:
            result = self._run_round(batch)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        self._publish()
        return result

    def _publish(self) -> None:
        """Export the metrics that the iteration changed."""
        parts = self.parts
        if self._exporter is not None:
            self._exporter.publish(self.counters, parts.kv, self.loop.speeds, parts.pool.pressure)
        if parts.disaggregation is not None:
            parts.disaggregation.publish()
        if self._remote_exporter is not None:
            self._remote_exporter.publish(parts.pool.prefix_tiers.remote_report)

    # Rounds

    def _run_round(self, batch: Any) -> GenerationBatchResult:
        states = batch.spec_info.states
        _check_states(batch, states)
        # SGLang has reserved slots for this round and the next one.
        num_ahead = 2 * self.speculative_num_draft_tokens
        round_batch = RoundBatch(
            states=states,
            pages=[],
            handles=batch.reqs,
            source=batch,
            wants_logprobs=batch.return_logprob,
        )
        self.parts.arrivals.receive(round_batch)
        counts = [state.committed_len + num_ahead for state in states]
        round_batch.pages = self.parts.table.of_batch(batch.req_pool_indices, counts)
        done = self.loop.run_round(round_batch)
        for req, entry in zip(batch.reqs, done.emitted, strict=True):
            if entry is not None and not entry.tokens:
                fail_without_choice(req)
        return self._result(batch, states, done)

    def _result(
        self, batch: Any, states: list[RequestState], done: RoundResult
    ) -> GenerationBatchResult:
        stride = self.speculative_num_draft_tokens
        emitted = [entry if entry is not None and entry.tokens else None for entry in done.emitted]
        # SGLang reads results on the CPU, all but new_seq_lens.
        tokens = torch.zeros((len(states), stride), dtype=torch.int64)
        for i, entry in enumerate(emitted):
            if entry is not None:
                tokens[i, : len(entry.tokens)] = torch.tensor(entry.tokens)
        logits_output = LogitsProcessorOutput(next_token_logits=done.logits)
        if batch.return_logprob:
            fill_logprobs(logits_output, batch, emitted, [s.params for s in states], stride)
        if self.config.stream == "paced":
            self._note_round_times(batch.reqs, states, emitted)
        cap_lens = done.num_verified
        lengths = [0 if entry is None else len(entry.tokens) for entry in emitted]
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=tokens.flatten(),
            accept_lens=torch.tensor(lengths, dtype=torch.int32),
            cap_lens=None if cap_lens is None else torch.tensor(cap_lens, dtype=torch.int32),
            new_seq_lens=to_device(
                batch.seq_lens.device,
                torch.tensor([s.committed_len for s in states], dtype=batch.seq_lens.dtype),
            ),
            next_draft_input=KVSpecDraftInput(states),
            speculative_num_draft_tokens=stride,
            can_run_cuda_graph=done.was_captured,
        )

    def _note_round_times(
        self,
        reqs: Sequence[Any],
        states: Sequence[RequestState],
        emitted: Sequence[VerifyResult | None],
    ) -> None:
        """Note when requests that emitted several tokens are expected to emit the next ones."""
        seconds = self.loop.seconds_to_next(states)
        for req, entry, each in zip(reqs, emitted, seconds, strict=True):
            if entry is not None and len(entry.tokens) > 1 and each:
                round_times.note(req, each)

    # Control plane

    def kvspec_report(self) -> dict[str, Any]:
        """Return the kvspec section of /server_info."""
        parts = self.parts
        allocator, pool = parts.allocator, parts.pool
        allocated = (allocator.size - allocator.available_size()) // parts.kv.geometry.page_size
        report = build_report(self.config, parts.kv, self.counters, allocated)
        # SGLang asks rank 0. Other ranks hold equally many pages, of other heads.
        prefixes = {} if pool.prefix_tiers is None else {"prefix_tiers": pool.prefix_tiers.report()}
        if parts.disaggregation is not None:
            report["transfer"] = parts.disaggregation.report()
        resolved = resolved_values(
            self.config,
            parts.kv.plan,
            schedule=schedule_of(self.config),
            view=view_of(self.config, on_gpu=isinstance(parts.kv, GpuKVCache)),
            num_sharing=ranks_on_a_machine(self.server_args),
        )
        return report | {
            "resolved": resolved,
            "ranks": self.ranks.size,
            "pressure": pool.pressure.report(),
            "draft_weights": draft_weights_report(parts.draft_weights),
            **self.loop.report(),
            **prefixes,
        }

    def weights_will_change(self) -> None:
        """Tell prefix tiers and links, and cancel the pre-launched round. Called before any update
        of weights, whatever its source."""
        if self.parts.pool.prefix_tiers is not None:
            self.parts.pool.prefix_tiers.weights_will_change()
        if self.parts.disaggregation is not None:
            self.parts.disaggregation.weights_will_change()
        if self.parts.draft_weights is not None:
            self.parts.draft_weights.weights_will_change()
        self.loop.overlap.cancel()

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        return True, "The draft is the target model."

    def update_weights_from_tensor(self, recv_req: Any) -> tuple[bool, str]:
        """Pass the update on to the target worker: SGLang asks the draft worker alone."""
        result: tuple[bool, str] = self._target_worker.update_weights_from_tensor(recv_req)
        return result

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        return True, "The draft is the target model."


def _check_states(batch: Any, states: Sequence[RequestState]) -> None:
    lengths = batch.seq_lens.tolist()
    for req, state, length in zip(batch.reqs, states, lengths, strict=True):
        assert state.rid == req.rid, "SGLang and KVSpec disagree on the order of requests"
        assert state.committed_len == length, (
            f"request {req.rid}: KVSpec has {state.committed_len} tokens, SGLang {length}"
        )
