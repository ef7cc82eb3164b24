"""What the speculative workers share: prefill, verification, and their place in SGLang."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_kvspec.adapters import loaded_hits, round_times
from sglang_kvspec.adapters.activation import config_of, staggers
from sglang_kvspec.adapters.first_tokens import first_tokens
from sglang_kvspec.adapters.grammar import allowed_by, masks_along
from sglang_kvspec.adapters.logprobs import fill_logprobs
from sglang_kvspec.adapters.ranks import device_of, ranks_of, ranks_on_a_machine
from sglang_kvspec.adapters.requests import fail_without_choice, new_state
from sglang_kvspec.adapters.spec_inputs import KVSpecDraftInput, RaggedForwardInput
from sglang_kvspec.adapters.spoiled_pages import SpoiledPages
from sglang_kvspec.adapters.transfer.apart import Apart
from sglang_kvspec.adapters.transfer.decoding import Decoding
from sglang_kvspec.pools.device_kv import DeviceKV
from sglang_kvspec.pools.transfers import sent_to
from sglang_kvspec.runtime.chooser import Chooser, Verified
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.forward_plan import ForwardPlan, Row, RowKind, prefill_row
from sglang_kvspec.runtime.metrics import MetricsExporter, SpecCounters
from sglang_kvspec.runtime.pages import DevicePageKeeper, PageKeeper
from sglang_kvspec.runtime.remote_prefixes import RemoteMetrics
from sglang_kvspec.runtime.report import build_report, resolved_values
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.round_stepper import RoundStepper
from sglang_kvspec.runtime.stepper import Stepper


class KVSpecWorker(BaseSpecWorker):  # type: ignore[misc]
    """Drafts and verifies with the target model itself; a subclass decides who does what when.

    Invariants with SGLang: batch.seq_lens is the number of tokens with verified KV; the pending
    token follows it; slots for drafts are reserved behind it and persist until it moves.
    """

    # Of the subclass, made once there are pools.
    stepper: Stepper | RoundStepper

    # Whether all of the last iteration came from CUDA graphs, which SGLang logs.
    _from_graphs = False

    # What _ragged_batch changes of a ScheduleBatch.
    FORWARD_FIELDS = (
        *("forward_mode", "input_ids", "out_cache_loc", "req_pool_indices", "seq_lens"),
        *("seq_lens_cpu", "seq_lens_sum", "spec_info"),
    )

    def __init__(
        self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any
    ) -> None:
        super().__init__()
        config = config_of(server_args)
        assert config is not None, "the KVSPEC worker was built without --kvspec"
        self.config = config
        self.server_args = server_args
        self._target_worker = target_worker
        self._draft_worker = None
        self.speculative_num_draft_tokens = config.max_draft_len + 1
        self.counters = SpecCounters()
        self._exporter: MetricsExporter | None = None
        self._remote_exporter: RemoteMetrics | None = None
        # Of a prefill or a decode server.
        self.apart: Apart | None = None
        self.ranks = ranks_of(target_worker.model_runner.tp_group)
        self.chooser = Chooser(server_args.random_seed, device_of(server_args, gpu_id))

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self._pool = token_to_kv_pool_allocator.get_kvcache()
        self.kv, self.pressure = self._pool.kv, self._pool.pressure
        on_device = isinstance(self.kv, DeviceKV)
        keeper = DevicePageKeeper if on_device else PageKeeper
        self.pages: DevicePageKeeper | PageKeeper = keeper(self.kv, self.config.recent_pages)
        self._pool.keeper = self.pages
        self.spoiled = SpoiledPages(self.kv.residuals, self.ranks, self.counters)
        if self.server_args.disaggregation_mode != "null":
            runner = self._target_worker.model_runner
            self.apart = Apart(self.config, self._pool, runner, self.server_args, self.ranks)
        if self.server_args.enable_metrics and self.ranks.is_first:
            self._exporter = MetricsExporter(self.server_args.served_model_name)
            if self.config.prefix_server is not None:
                self._remote_exporter = RemoteMetrics(self.server_args.served_model_name)

    @property
    def decoding(self) -> Decoding | None:
        return None if self.apart is None else self.apart.decoding

    @property
    def attention(self) -> Any:
        return self._target_worker.model_runner.attn_backend.attention

    def forward_batch_generation(
        self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None = None, **kwargs: Any
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_extend():
            result = self._prefill(batch)
        elif batch.forward_mode.is_idle():
            result = self._target_worker.forward_batch_generation(batch)
            result.next_draft_input = KVSpecDraftInput([])
        else:
            result = self._iterate(batch)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        if self._exporter is not None:
            self._exporter.publish(self.counters, self.kv, self.stepper.speeds, self.pressure)
        if self.apart is not None:
            self.apart.publish()
        if self._remote_exporter is not None:
            self._remote_exporter.publish(self._pool.prefix_tiers.remote_report)
        return result

    # Prefill

    def _prefill(self, batch: Any) -> GenerationBatchResult:
        size = self.kv.geometry.page_size
        rows = [
            prefill_row(
                start,
                length,
                self._page_ids(req, start + length),
                page_size=size,
                recent_pages=self.config.recent_pages,
            )
            for req, start, length in zip(
                batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
            )
        ]
        for req, row in zip(batch.reqs, rows, strict=True):
            cached, computed = row.past_pages(size), row.pages[row.start // size :]
            if self.spoiled.fails(req, cached):
                self.kv.residuals.spoil(computed.tolist())
        self.kv.prefetch_residuals(page for row in rows for page in row.past_pages(size).tolist())
        result = self._forward(ForwardPlan(tuple(rows)), batch=batch)
        for row in rows:
            self.pages.commit(row.pages, row.start, row.end)
        self._count_hits(batch.reqs)
        logits = result.logits_output.next_token_logits
        firsts = first_tokens(batch.reqs, rows, logits, self.chooser, self.ranks)
        states = [
            new_state(req, row.end, 0 if first is None else first.tokens[0])
            for req, row, first in zip(batch.reqs, rows, firsts, strict=True)
        ]
        if batch.return_logprob:
            fill_logprobs(result.logits_output, batch, firsts, [s.params for s in states])
        self.pages.flush()
        for req in batch.reqs if self.apart is not None else ():
            if req.inflight_middle_chunks <= 0:
                self.apart.note_prompt(req)
            if req.to_finish is not None:
                self.apart.withhold(req)
        device = batch.seq_lens.device
        result.next_token_ids = torch.tensor([s.pending for s in states], device=device)
        result.accept_lens = torch.ones(len(rows), dtype=torch.int32, device=device)
        result.new_seq_lens = batch.seq_lens.clone()
        result.next_draft_input = KVSpecDraftInput(states)
        result.speculative_num_draft_tokens = self.speculative_num_draft_tokens
        return result

    def _count_hits(self, reqs: Sequence[Any]) -> None:
        """Of requests whose prompt is complete with this forward, for the first time."""
        for req in reqs:
            if req.inflight_middle_chunks == 0 and not req.retracted_stain:
                loaded = loaded_hits.tokens_of(req)
                self.counters.observe_hits(
                    resident=req.cached_tokens_device,
                    host=req.cached_tokens_host,
                    disk=req.cached_tokens_storage - loaded.remote,
                    remote=loaded.remote,
                )
                self.counters.observe_kept_anchors(host=loaded.kept_host, disk=loaded.kept_disk)

    # Drafting and verifying

    @abstractmethod
    def _iterate(self, batch: Any) -> GenerationBatchResult:
        """Draft, verify, or both, for the requests of a decode batch."""

    @abstractmethod
    def _expected_s(self, states: list[RequestState], lengths: list[int]) -> dict[int, float]:
        """Return the seconds until requests that emitted lengths[i] > 1 tokens emit the next ones,
        as far as that is known."""

    def _verify(self, req: Any, state: RequestState, logits: torch.Tensor) -> Verified:
        """Judge a request's drafts by its rows of logits. Does not commit."""
        masks = masks_along(req.grammar, state.drafts, logits)
        verified = self.chooser.verify(state, logits, allowed_by(masks))
        if masks is not None:
            verified = verified._replace(tokens=verified.tokens[: masks.max_tokens])
        return verified

    def _commit(
        self, req: Any, state: RequestState, row: Row, verified: Verified
    ) -> Verified | None:
        """Take over what a verification emitted; None for a request that cannot go on."""
        if not verified.tokens:
            fail_without_choice(req)
            return None
        self.counters.observe_verification(len(state.drafts), len(verified.tokens) - 1)
        before = state.verified_len
        if self.decoding is not None:
            self.decoding.note_verification(state, len(verified.tokens))
        state.commit(verified.tokens)
        self.pages.commit(row.pages, before, state.committed_len)
        return verified

    def _result(
        self,
        batch: Any,
        states: list[RequestState],
        verified: Sequence[Verified | None],
        cap_lens: list[int] | None,
        logits_output: Any,
    ) -> GenerationBatchResult:
        """cap_lens: drafts that were verified; None where nobody drafted or verified."""
        stride = self.speculative_num_draft_tokens
        # SGLang reads these on the CPU, all but the lengths.
        tokens = torch.zeros((len(states), stride), dtype=torch.int64)
        for i, entry in enumerate(verified):
            if entry is not None:
                tokens[i, : len(entry.tokens)] = torch.tensor(entry.tokens)
        if batch.return_logprob:
            fill_logprobs(logits_output, batch, verified, [s.params for s in states], stride)
        lengths = [0 if entry is None else len(entry.tokens) for entry in verified]
        if self.config.stream == "paced":
            for i, seconds in self._expected_s(states, lengths).items():
                round_times.note(batch.reqs[i], seconds)
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=tokens.flatten(),
            accept_lens=torch.tensor(lengths, dtype=torch.int32),
            cap_lens=None if cap_lens is None else torch.tensor(cap_lens, dtype=torch.int32),
            new_seq_lens=sent_to(
                batch.seq_lens.device,
                torch.tensor([s.committed_len for s in states], dtype=batch.seq_lens.dtype),
            ),
            next_draft_input=KVSpecDraftInput(states),
            speculative_num_draft_tokens=stride,
            can_run_cuda_graph=self._from_graphs,
        )

    # Forward

    def _forward(
        self, plan: ForwardPlan, batch: Any = None, forward_batch: Any = None
    ) -> GenerationBatchResult:
        """Run the model without sampling; logits of a prefill's last tokens, or of every token."""
        self.attention.begin(plan)
        result = self._target_worker.forward_batch_generation(
            batch, forward_batch=forward_batch, is_verify=True
        )
        self.attention.finish()
        return result

    def _ragged_batch(
        self,
        batch: Any,
        states: list[RequestState],
        rows: dict[int, Row],
        drafted: DraftedTokens | None = None,
    ) -> ForwardBatch:
        """A TARGET_VERIFY batch of the given rows. Verified are the states' drafts, and behind them
        those of `drafted` where it is given. SGLang restores `batch` after the iteration."""
        tokens, positions, firsts, lasts = self._tokens_of(states, rows)
        device = batch.seq_lens.device

        def on_device(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return sent_to(device, torch.as_tensor(values, dtype=dtype))

        taking_part = on_device(list(rows))
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = on_device(tokens)
        if drafted is not None:
            drafted.place(batch.input_ids, firsts, lasts)
        # Where KV goes is the attention backend's to know.
        batch.out_cache_loc = torch.zeros(len(tokens), dtype=torch.int64, device=device)
        batch.req_pool_indices = batch.req_pool_indices[taking_part]
        ends = torch.tensor([row.end for row in rows.values()], dtype=batch.seq_lens.dtype)
        batch.seq_lens, batch.seq_lens_cpu = on_device(ends, ends.dtype), ends
        batch.seq_lens_sum = int(ends.sum())
        batch.spec_info = RaggedForwardInput(on_device(positions))
        # Log-probabilities are computed here from verified logits, not by the logits processor.
        wants_logprob, batch.return_logprob = batch.return_logprob, False
        forward_batch = ForwardBatch.init_new(
            batch,
            self._target_worker.model_runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        batch.return_logprob = wants_logprob
        lengths = [row.length for row in rows.values()]
        starts = [row.start for row in rows.values()]
        forward_batch.extend_seq_lens = on_device(lengths, torch.int32)
        forward_batch.extend_prefix_lens = on_device(starts, torch.int32)
        forward_batch.extend_seq_lens_cpu = lengths
        forward_batch.extend_prefix_lens_cpu = starts
        return forward_batch

    @staticmethod
    def _tokens_of(
        states: Sequence[RequestState], rows: dict[int, Row]
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        """Tokens of a ragged forward, their positions, and for every request where behind its
        states' drafts those follow that are only on the device, or -1 for one without a VERIFY row,
        and where its last token is, or -1 for one without a DRAFT row."""
        tokens: list[int] = []
        positions: list[int] = []
        firsts, lasts = [-1] * len(states), [-1] * len(states)
        for i, row in rows.items():
            state = states[i]
            if row.kind is RowKind.DRAFT:
                given = state.undrafted
                lasts[i] = len(tokens) + len(given) - 1
            else:
                given = state.unverified
                firsts[i] = len(tokens) + len(given)
            tokens += given + [0] * (row.length - len(given))
            positions += range(row.start, row.end)
        return tokens, positions, firsts, lasts

    # Requests

    def _page_ids(self, req: Any, num_tokens: int) -> torch.Tensor:
        """Of a request's first tokens: [ceil(num_tokens / page_size)] int64 on the CPU."""
        size = self.kv.geometry.page_size
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, :num_tokens:size]
        return slots.cpu().to(torch.int64) // size

    @staticmethod
    def _zip(batch: Any, states: list[RequestState]) -> Any:
        return zip(batch.reqs, states, strict=True)

    def _check_states(self, batch: Any, states: list[RequestState]) -> None:
        lengths = batch.seq_lens.tolist()
        for (req, state), length in zip(self._zip(batch, states), lengths, strict=True):
            assert state.rid == req.rid, "SGLang and KVSpec disagree on the order of requests"
            assert state.committed_len == length, f"{req.rid}: {state.committed_len} != {length}"

    # Control plane

    def kvspec_report(self) -> dict[str, Any]:
        allocator = self.token_to_kv_pool_allocator
        allocated = (allocator.size - allocator.available_size()) // self.kv.geometry.page_size
        report = build_report(self.config, self.kv, self.counters, allocated)
        # SGLang asks the first rank; the others hold as many pages, of other heads.
        tiers = self._pool.prefix_tiers
        prefixes = {} if tiers is None else {"prefix_tiers": tiers.report()}
        if self.apart is not None:
            report["transfer"] = self.apart.report()
        resolved = resolved_values(
            self.config,
            self.kv.plan,
            schedule="staggered" if staggers(self.config) else "rounds",
            num_sharing=ranks_on_a_machine(self.server_args),
        )
        return report | {
            "resolved": resolved,
            "ranks": self.ranks.size,
            "speeds": self.stepper.speeds.report(),
            "pressure": self.pressure.report(),
            **prefixes,
        }

    def weights_will_change(self) -> None:
        """Called before any update of weights, from wherever they come."""
        if self._pool.prefix_tiers is not None:
            self._pool.prefix_tiers.weights_will_change()
        if self.apart is not None:
            self.apart.weights_will_change()

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        return True, "The draft is the target model."

    def update_weights_from_tensor(self, recv_req: Any) -> tuple[bool, str]:
        """SGLang asks the draft worker alone, which is to pass it on."""
        result: tuple[bool, str] = self._target_worker.update_weights_from_tensor(recv_req)
        return result

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        return True, "The draft is the target model."
