"""The speculative worker: one ragged forward an iteration, staggered verifications."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_kvspec.adapters.activation import config_of
from sglang_kvspec.adapters.grammar import GrammarMasks, masks_along
from sglang_kvspec.adapters.logprobs import fill_logprobs
from sglang_kvspec.adapters.requests import sampling_params_of
from sglang_kvspec.adapters.spec_inputs import KVSpecDraftInput, RaggedForwardInput
from sglang_kvspec.planning.step import StepPlan
from sglang_kvspec.runtime.chooser import Chooser, Verified
from sglang_kvspec.runtime.forward_plan import ForwardPlan, Row, RowKind, prefill_row
from sglang_kvspec.runtime.metrics import MetricsExporter, SpecCounters
from sglang_kvspec.runtime.pages import PageKeeper
from sglang_kvspec.runtime.report import build_report
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.stepper import Stepper


class KVSpecWorker(BaseSpecWorker):  # type: ignore[misc]
    """Drafts and verifies with the target model itself.

    Invariants with SGLang: batch.seq_lens is the number of tokens with verified KV; the pending
    token follows it; slots for drafts are reserved behind it and persist until it moves.
    """

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
        self.chooser = Chooser(server_args.random_seed, torch.device(server_args.device))

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.kv = token_to_kv_pool_allocator.get_kvcache().kv
        self.pages = PageKeeper(self.kv, self.config.recent_pages)
        self.stepper = Stepper(self.config, self.kv)
        if self.server_args.enable_metrics:
            self._exporter = MetricsExporter(self.server_args.served_model_name)

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
            self._exporter.publish(self.counters, self.kv)
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
        result = self._forward(ForwardPlan(tuple(rows)), batch=batch)
        firsts, states = [], []
        for i, (req, row) in enumerate(zip(batch.reqs, rows, strict=True)):
            self.pages.commit(row.pages, row.start, row.end)
            params, output = sampling_params_of(req), list(req.output_ids)
            first = self._first_token(req, row, params, output, result.logits_output, i)
            firsts.append(None if first is None else (first, params))
            token = 0 if first is None else first.tokens[0]
            state = RequestState(
                rid=req.rid,
                committed_len=row.end,
                pending=token,
                output=[*output, token],
                params=params,
                remaining=params_remaining(req, len(output) + 1),
            )
            self.stepper.start_cycle(state, len(batch.reqs))
            states.append(state)
        if batch.return_logprob:
            fill_logprobs(result.logits_output, batch, firsts)
        device = batch.seq_lens.device
        result.next_token_ids = torch.tensor([s.pending for s in states], device=device)
        result.accept_lens = torch.ones(len(rows), dtype=torch.int32, device=device)
        result.new_seq_lens = batch.seq_lens.clone()
        result.next_draft_input = KVSpecDraftInput(states)
        result.speculative_num_draft_tokens = self.speculative_num_draft_tokens
        return result

    def _first_token(
        self, req: Any, row: Row, params: Any, output: list[int], logits_output: Any, index: int
    ) -> Verified | None:
        """None for a chunk that is not the last: SGLang ignores its token."""
        if req.inflight_middle_chunks > 0:
            return None
        logits = logits_output.next_token_logits[index : index + 1]
        masks = masks_along(req.grammar, (), logits)
        return self.chooser.first(logits, params, output, row.end, _allowed(masks))

    # Drafting and verifying

    def _iterate(self, batch: Any) -> GenerationBatchResult:
        states = batch.spec_info.states
        self._check_states(batch, states)
        pages = [self._page_ids(req, s.committed_len) for req, s in self._zip(batch, states)]
        plan = self.stepper.plan(states, pages)
        rows = self._rows(plan, batch, states)
        verified: list[Verified | None] = [None] * len(states)
        logits_output = LogitsProcessorOutput(next_token_logits=None)
        cap_lens = [0] * len(states)
        if rows:
            indices = list(rows)
            result = self._forward(
                ForwardPlan(tuple(rows.values())),
                forward_batch=self._ragged_batch(batch, states, rows),
            )
            logits_output = result.logits_output
            spans = logits_output.next_token_logits.split([r.length for r in rows.values()])
            for i, logits in zip(indices, spans, strict=True):
                if rows[i].kind is RowKind.DRAFT:
                    masks = self._draft_masks(batch.reqs[i], states[i], logits)
                    self.chooser.draft(states[i], logits, masks)
                else:
                    cap_lens[i] = len(states[i].drafts)
                    verified[i] = self._verify(batch.reqs[i], states[i], rows[i], logits)
        self.counters.observe_step(plan)
        return self._result(batch, states, verified, cap_lens, logits_output)

    def _verify(self, req: Any, state: RequestState, row: Row, logits: torch.Tensor) -> Verified:
        masks = masks_along(req.grammar, state.drafts, logits)
        verified = self.chooser.verify(state, logits, _allowed(masks))
        if masks is not None:
            verified = verified._replace(tokens=verified.tokens[: masks.max_tokens])
        self.counters.observe_verification(len(state.drafts), len(verified.tokens) - 1)
        before = state.committed_len
        state.commit(verified.tokens)
        self.pages.commit(row.pages, before, state.committed_len)
        self.stepper.start_cycle(state)
        return verified

    def _draft_masks(
        self, req: Any, state: RequestState, logits: torch.Tensor
    ) -> torch.Tensor | None:
        """What the grammar allows after all drafts so far: logits [1, vocab]."""
        if req.grammar is None:
            return None
        along = logits.expand(len(state.drafts) + 1, -1)
        masks = masks_along(req.grammar, state.drafts, along)
        return None if masks is None else masks.allowed[-1:]

    def _rows(self, plan: StepPlan, batch: Any, states: list[RequestState]) -> dict[int, Row]:
        """Row of every request that takes part in this forward, in batch order."""
        rows: dict[int, Row] = {}
        for i, (req, state) in enumerate(self._zip(batch, states)):
            if i in plan.wait:
                state.waited += 1
            elif i in plan.draft:
                ids = self._page_ids(req, state.next_position + 1)
                rows[i] = Row(RowKind.DRAFT, state.next_position, 1, ids)
            else:
                length = len(state.drafts) + 1
                ids = self._page_ids(req, state.committed_len + length)
                rows[i] = Row(RowKind.VERIFY, state.committed_len, length, ids)
        return rows

    def _result(
        self,
        batch: Any,
        states: list[RequestState],
        verified: list[Verified | None],
        cap_lens: list[int],
        logits_output: Any,
    ) -> GenerationBatchResult:
        stride, device = self.speculative_num_draft_tokens, batch.seq_lens.device
        tokens = torch.zeros((len(states), stride), dtype=torch.int64, device=device)
        for i, entry in enumerate(verified):
            if entry is not None:
                tokens[i, : len(entry.tokens)] = torch.tensor(entry.tokens)
        if batch.return_logprob:
            emitted = [
                None if entry is None else (entry, state.params)
                for entry, state in zip(verified, states, strict=True)
            ]
            fill_logprobs(logits_output, batch, emitted, stride)
        lengths = [0 if entry is None else len(entry.tokens) for entry in verified]
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=tokens.flatten(),
            accept_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            cap_lens=torch.tensor(cap_lens, dtype=torch.int32, device=device),
            new_seq_lens=torch.tensor(
                [s.committed_len for s in states], dtype=batch.seq_lens.dtype, device=device
            ),
            next_draft_input=KVSpecDraftInput(states),
            speculative_num_draft_tokens=stride,
            can_run_cuda_graph=False,
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
        self, batch: Any, states: list[RequestState], rows: dict[int, Row]
    ) -> ForwardBatch:
        """A TARGET_VERIFY batch of the given rows. SGLang restores `batch` after the iteration."""
        tokens, positions, slots = [], [], []
        for i, row in rows.items():
            state = states[i]
            is_draft = row.kind is RowKind.DRAFT
            tokens += [state.last_token] if is_draft else [state.pending, *state.drafts]
            positions += range(row.start, row.end)
            req_slots = self.req_to_token_pool.req_to_token[batch.reqs[i].req_pool_idx]
            slots.append(req_slots[row.start : row.end])
        device = batch.seq_lens.device
        taking_part = torch.tensor(list(rows), device=device)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = torch.tensor(tokens, dtype=torch.int64, device=device)
        batch.out_cache_loc = torch.cat(slots).to(torch.int64)
        batch.req_pool_indices = batch.req_pool_indices[taking_part]
        ends = torch.tensor([row.end for row in rows.values()], dtype=batch.seq_lens.dtype)
        batch.seq_lens, batch.seq_lens_cpu = ends.to(device), ends
        batch.seq_lens_sum = int(ends.sum())
        batch.spec_info = RaggedForwardInput(torch.tensor(positions, device=device))
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
        forward_batch.extend_seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        forward_batch.extend_prefix_lens = torch.tensor(starts, dtype=torch.int32, device=device)
        forward_batch.extend_seq_lens_cpu = lengths
        forward_batch.extend_prefix_lens_cpu = starts
        return forward_batch

    # Requests

    def _page_ids(self, req: Any, num_tokens: int) -> torch.Tensor:
        """Page ids [ceil(num_tokens / page_size)] int64 of a request's first tokens."""
        size = self.kv.geometry.page_size
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, :num_tokens:size]
        return slots.to(torch.int64) // size

    @staticmethod
    def _zip(batch: Any, states: list[RequestState]) -> Any:
        return zip(batch.reqs, states, strict=True)

    def _check_states(self, batch: Any, states: list[RequestState]) -> None:
        lengths = batch.seq_lens.tolist()
        for (req, state), length in zip(self._zip(batch, states), lengths, strict=True):
            assert state.rid == req.rid, "SGLang and KVSpec disagree on the order of requests"
            assert state.committed_len == length, f"{req.rid}: {state.committed_len} != {length}"

    def prepare_for_kv_cache_release(self, req: Any) -> None:
        """A request finishes: what SGLang now keeps as prefix cache leaves the recent window."""
        self.pages.retire(self._page_ids(req, req.kv_committed_len))

    # Control plane

    def kvspec_report(self) -> dict[str, Any]:
        allocator = self.token_to_kv_pool_allocator
        allocated = (allocator.size - allocator.available_size()) // self.kv.geometry.page_size
        return build_report(self.config, self.kv, self.counters, allocated)

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        return True, "The draft is the target model."

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        return True, "The draft is the target model."


def _allowed(masks: GrammarMasks | None) -> torch.Tensor | None:
    return None if masks is None else masks.allowed


def params_remaining(req: Any, num_output: int) -> int:
    """Tokens a request may still emit after num_output."""
    return int(req.sampling_params.max_new_tokens) - num_output
