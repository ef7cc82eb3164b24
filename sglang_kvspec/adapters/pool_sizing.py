"""Capacity plan in SGLang's terms: the number of tokens that SGLang may allocate."""

from __future__ import annotations

from functools import partial
from typing import Any

import psutil
import torch

from sglang_kvspec.adapters.activation import debug_mode
from sglang_kvspec.adapters.compat.pool_sizing import DefaultPoolConfigurator, MemoryPoolConfig
from sglang_kvspec.adapters.draft_view import view_of
from sglang_kvspec.adapters.draft_weights import copied_layers, copy_bytes, has_copies
from sglang_kvspec.adapters.ranks import (
    least_of_all_ranks,
    ranks_on_a_machine,
    ranks_on_a_numa_node,
)
from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.codecs.registry import make_codec
from sglang_kvspec.core.compressor import GENERATED_SHARE
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.units import GIB
from sglang_kvspec.engine.prompt_repeats import PIECE
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.packed_store import work_bytes
from sglang_kvspec.kv.staged_records import buffer_bytes
from sglang_kvspec.planning.capacity import (
    ALL_HAVE_ANCHORS,
    HOST_MEMORY,
    MAX_TOKENS,
    RECENT_WINDOW,
    AnchorShare,
    CapacityPlan,
    PageBytes,
    kept_anchor_pages_for,
    pages_of_one_request,
    plan_capacity,
    split_shared_memory,
    window_pages_for,
)
from sglang_kvspec.planning.record_bytes import stored_page_bytes
from sglang_kvspec.runtime import earlier_tokens
from sglang_kvspec.runtime.budget_views import ScoredPages, fixed_budget
from sglang_kvspec.runtime.device_pages import nbytes_of
from sglang_kvspec.runtime.disaggregation.page_wire import AT_ONCE_BYTES, CODEC_WORK
from sglang_kvspec.runtime.piggyback_rows import MOST_PIGGYBACK
from sglang_kvspec.runtime.targets.flashinfer_pages import WORKSPACE_BYTES
from sglang_kvspec.scorers.making import allocation_of, make_scorer

# Host memory left to the operating system and to SGLang's own processes.
HOST_RESERVE_BYTES = 2 * GIB


# By id() of SGLang's configurator object, which has slots and allows no weak reference.
_plans: dict[int, CapacityPlan] = {}


def take_plan(kvc: Any) -> CapacityPlan:
    """Return the plan that was last made for `kvc`, and forget it."""
    return _plans.pop(id(kvc))


class KVSpecPoolConfigurator(DefaultPoolConfigurator):  # type: ignore[misc]
    """SGLang's pool configurator: makes a CapacityPlan of a KV memory budget or a token limit.

    SGLang makes several of these for one pool. This module keeps the plan of the last sizing, and
    the pool is built from it a moment later. Every rank plans for itself, from values that are
    equal on all ranks, so that all ranks get the same number of pages.
    """

    def __init__(self, kvc: Any, config: KVSpecConfig) -> None:
        super().__init__(kvc)
        self._kvc = kvc
        self._config = config
        self._budget_bytes: int | None = None

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        if self._kvc.device == "cpu":
            available_bytes //= ranks_on_a_numa_node(self._kvc.server_args)
        self._budget_bytes = available_bytes - self._outside_bytes()
        try:
            return self._plan(max_pages=None)
        except ConfigError as error:
            copies = draft_copy_bytes(self._kvc, self._config)
            if not copies:
                raise
            self._budget_bytes += copies
            # Raises again if the memory of the copies would not have sufficed.
            self._plan(max_pages=None)
            raise ConfigError(
                f"--kvspec-draft-weights takes {copies / GIB:.2f} GiB for weights in 4 bits, which "
                "leaves too little KV memory: raise --mem-fraction-static or lower "
                "--max-running-requests, or leave the flag out"
            ) from error

    def calculate_pool_sizes_from_max_tokens(
        self, max_total_num_tokens: int, page_size: int
    ) -> MemoryPoolConfig:
        return self._plan(max_pages=max_total_num_tokens // page_size)

    def _outside_bytes(self) -> int:
        """Return the bytes that a GPU needs outside of its pools and that SGLang does not count.

        FlashInfer needs a workspace. Logits of the largest verification and its piggyback drafts
        are held in the model's dtype and in fp32. Copies of pages that leave or land need a buffer,
        and pages that are sent whole or packed need memory to convert them. A draft view needs
        memory for its selection. 0 on a CPU.
        """
        if self._kvc.device == "cpu":
            return 0
        args = self._kvc.server_args
        tokens = args.max_running_requests * (self._config.max_draft_len + 1)
        if self._config.host_gb != 0:
            tokens += min(args.max_running_requests, MOST_PIGGYBACK)
        compressor = self._config.parsed_compressor
        if compressor is not None and make_scorer(compressor).needs.repeats:
            # A forward that repeats a part of a prompt gives logits of all its tokens, beside those
            # of captured verifications.
            tokens += PIECE
        itemsize = self._kvc.model_config.dtype.itemsize + torch.float32.itemsize
        logits_bytes = tokens * int(self._kvc.model_config.vocab_size) * itemsize
        page = page_bytes_of(geometry_of(self._kvc), codec_of(self._kvc, self._config), on_gpu=True)
        buffer = 0
        if self._config.keeps_prefixes or args.disaggregation_mode != "null":
            buffer = buffer_bytes(max(page.anchor, page.residual))
            if self._config.transfer != "split":
                buffer += CODEC_WORK * max(AT_ONCE_BYTES, page.plain)
        if self._config.packs_residuals and self._config.host_gb:
            buffer += work_bytes(page.residual)
        return WORKSPACE_BYTES + logits_bytes + buffer + self._selection_bytes()

    def _selection_bytes(self) -> int:
        """Return the bytes that a GPU needs to select the pages that drafts read."""
        args, model, config = self._kvc.server_args, self._kvc.model_config, self._config
        has_lists = config.compressor is not None or view_of(config, on_gpu=True) == "pages"
        if not has_lists or args.disaggregation_mode == "prefill":
            return 0
        geometry = geometry_of(self._kvc)
        most_pages = -(-int(model.context_len) // geometry.page_size)
        compressor = config.parsed_compressor
        if compressor is not None:
            # A list entry for each page of each layer and KV head.
            heads = geometry.num_layers * geometry.num_kv_heads
            if allocation_of(compressor) == "same":
                heads = 0
            lists = int(args.max_running_requests) * most_pages * heads * torch.int32.itemsize
            return lists + earlier_tokens.nbytes_of(geometry, most_pages)
        return nbytes_of(
            geometry,
            model.num_attention_heads // args.tp_size,
            args.max_running_requests,
            most_pages,
            config.max_draft_len,
            ScoredPages.num_queries,
        )

    def _plan(self, max_pages: int | None) -> MemoryPoolConfig:
        config, geometry = self._config, geometry_of(self._kvc)
        page_bytes = page_bytes_of(
            geometry,
            codec_of(self._kvc, config),
            on_gpu=self._kvc.device != "cpu",
            frees_anchors=config.frees_anchors,
        )
        window_pages = window_pages_for(
            self._kvc.server_args.max_running_requests,
            config.recent_pages,
            config.max_draft_len,
            geometry.page_size,
        )
        assert self._budget_bytes is not None, "SGLang must profile memory before it caps tokens"
        num_sharing = ranks_on_a_machine(self._kvc.server_args)
        budget_bytes = self._budget_bytes
        kept_pages = kept_anchor_pages_for(
            budget_bytes, page_bytes, window_pages, config.prefix_hbm_fraction
        )
        host_limit_bytes = least_of_all_ranks(available_host_bytes() // num_sharing)
        host_bytes = None if config.host_gb is None else int(config.host_gb * GIB) // num_sharing
        anchors = _anchor_share(self._kvc, config)
        min_cache_pages = 0
        if self._kvc.device != "cpu":
            host_bytes = host_bytes or 0
            # Kernels read residuals from the cache only, which must hold the one request that
            # prefills at a time.
            min_cache_pages = _pages_of_one_request(self._kvc, config)
        elif host_bytes is None:
            kept_bytes = kept_pages * page_bytes.anchor
            kv_bytes, host_limit_bytes = split_shared_memory(
                budget_bytes - kept_bytes,
                page_bytes,
                window_pages,
                config.residual_hbm_fraction,
                anchors,
            )
            budget_bytes = kv_bytes + kept_bytes
        make = partial(
            plan_capacity,
            budget_bytes,
            page_bytes,
            window_pages=window_pages,
            residual_fraction=config.residual_hbm_fraction,
            host_limit_bytes=host_limit_bytes,
            max_pages=max_pages,
            kept_anchor_pages=kept_pages,
            anchors=anchors,
        )
        plan = make(host_bytes=host_bytes, min_cache_pages=min_cache_pages)
        if self._kvc.device != "cpu" and plan.host_pages:
            unhosted = make(host_bytes=0)
            holds_all = plan.cache_pages == plan.num_pages
            if holds_all or unhosted.num_pages > plan.num_pages:
                plan = unhosted
        _plans[id(self._kvc)] = plan
        return MemoryPoolConfig(max_total_num_tokens=plan.num_pages * geometry.page_size)


def _pages_of_one_request(kvc: Any, config: KVSpecConfig) -> int:
    context_len = int(kvc.model_config.context_len)
    return pages_of_one_request(context_len, config.max_draft_len, geometry_of(kvc).page_size)


def _anchor_share(kvc: Any, config: KVSpecConfig) -> AnchorShare:
    """Return how many pages have anchors at once. Where a compressor frees some, those of a prompt
    stay until its scores are known."""
    if not config.frees_anchors:
        return ALL_HAVE_ANCHORS
    share = fixed_budget(config) + GENERATED_SHARE
    return AnchorShare(share, _pages_of_one_request(kvc, config))


def draft_copy_bytes(kvc: Any, config: KVSpecConfig) -> int:
    """Return the GPU memory that 4-bit copies of weights for drafts take. They exist when the pool
    is sized, so SGLang's budget is without it. 0 on a CPU."""
    if kvc.device == "cpu" or not has_copies(config, kvc.server_args):
        return 0
    is_checkpoint = config.weight_checkpoint is not None
    return copy_bytes(copied_layers(kvc.model, is_checkpoint=is_checkpoint))


def available_host_bytes() -> int:
    """Return the host memory that the residual store may take if its size is not given."""
    return max(int(psutil.virtual_memory().available) - HOST_RESERVE_BYTES, 0)


def geometry_of(kvc: Any) -> KVGeometry:
    from sglang_kvspec.adapters.compat.runtime_context import get_parallel

    return KVGeometry(
        num_layers=kvc.layer_info.num_effective_layers,
        num_kv_heads=kvc.model_config.get_num_kv_heads(get_parallel().attn_tp_size),
        head_dim=kvc.model_config.head_dim,
        page_size=kvc.server_args.page_size,
        dtype=kvc.kv_cache_dtype,
    )


def codec_of(kvc: Any, config: KVSpecConfig) -> Codec:
    return make_codec(
        config.codec,
        target=config.target,
        anchor_bits=config.anchor_bits,
        page_size=kvc.server_args.page_size,
        head_dim=kvc.model_config.head_dim,
        dtype=kvc.kv_cache_dtype,
        debug=debug_mode(),
        packs=config.packs_residuals,
    )


def page_bytes_of(
    geometry: KVGeometry, codec: Codec, *, on_gpu: bool, frees_anchors: bool = False
) -> PageBytes:
    """Return the bytes of a page. on_gpu: a host store holds residuals in the codec's form.
    frees_anchors: packed residuals take the anchors along that the KV cache may free."""
    records = geometry.num_layers * geometry.num_kv_heads
    packed = codec.packed if on_gpu else None
    anchor = records * codec.anchor_bytes
    return PageBytes(
        plain=geometry.plain_page_bytes,
        anchor=anchor,
        residual=records * codec.residual_bytes,
        packed=(
            None
            if packed is None
            else stored_page_bytes(records, packed.record_bytes, packed.raw_v_bytes)
            + frees_anchors * anchor
        ),
        takes_anchors=packed is not None and frees_anchors,
    )


def describe(
    plan: CapacityPlan,
    config: KVSpecConfig,
    codec: Codec,
    page_size: int,
    num_ranks: int = 1,
    copies_bytes: int = 0,
) -> str:
    """Return the plan in one line for a person. copies_bytes: from draft_copy_bytes()."""
    draft_len = config.draft_len if config.drafts else "off"
    kept, copies = plan.kept_anchor_pages * plan.page_bytes.anchor / GIB, copies_bytes / GIB
    some_anchors = ""
    if plan.pages_without_anchors:
        some_anchors = f" of {plan.anchor_pages / plan.num_pages:.0%} of the pages at once"
    return (
        f"KVSpec: {plan.num_pages * page_size} tokens fit{_limit(plan, page_size)}; "
        f"target {config.target}, codec {config.codec} "
        f"({codec.anchor_bits_per_element:.2f} bits an element), draft length {draft_len}; "
        f"{f'on each of {num_ranks} ranks: ' if num_ranks > 1 else ''}"
        f"KV memory {plan.hbm_bytes / GIB:.2f} GiB = anchors "
        f"{plan.anchor_pages * plan.page_bytes.anchor / GIB:.2f}"
        f"{some_anchors} + recent window "
        f"{plan.window_pages * plan.page_bytes.plain / GIB:.2f} + residual cache "
        f"{plan.cache_pages * plan.page_bytes.residual / GIB:.2f}"
        f"{f' + kept anchors {kept:.2f}' if kept else ''}; "
        f"{f'beside it 4-bit weights {copies:.2f} GiB; ' if copies_bytes else ''}"
        f"residual store {plan.host_bytes / GIB:.2f} GiB of host memory"
        f"{', packed' if plan.host_pages and plan.page_bytes.packed else ''}"
    )


def _limit(plan: CapacityPlan, page_size: int) -> str:
    """Return what limits the plan. Compare it with plain KV if KV memory is the limit, or host
    memory that still holds more tokens than plain KV."""
    if plan.binding == MAX_TOKENS:
        return f", limited by {MAX_TOKENS}"
    if plan.binding == RECENT_WINDOW:
        share = plan.window_bytes / plan.hbm_bytes
        return (
            f": the recent window takes {share:.0%} of the KV memory "
            "(lower --max-running-requests to fit more tokens)"
        )
    ratio = plan.num_pages / max(plan.plain_pages, 1)
    if plan.binding == HOST_MEMORY and ratio < 1:
        return ", limited by host memory for residuals (raise --kvspec-host-gb to fit more)"
    plain = plan.plain_pages * page_size
    return f" where plain KV holds {plain} ({ratio:.2f}x, limited by {plan.binding})"
