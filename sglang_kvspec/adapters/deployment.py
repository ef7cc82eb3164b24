"""Choices by forecast for a server whose model is yet to be loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from sglang_kvspec.core.codec_names import UNTRIED_ON_GPU
from sglang_kvspec.core.config import AUTO_RESIDUAL, KVSpecConfig, Weights
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.units import GIB
from sglang_kvspec.planning.devices import DEVICES, MEMORY_SHARE, PRODUCTS
from sglang_kvspec.planning.forecast import MEASURED_ACCEPTANCE, Deployment
from sglang_kvspec.planning.gains import Choice
from sglang_kvspec.planning.model_shape import ModelShape

T = TypeVar("T")


def choose_by_forecast(
    choose: Callable[[Deployment], Choice[T]],
    otherwise: T,
    config: KVSpecConfig,
    fields: dict[str, Any],
    model: Any,
) -> Choice[T]:
    """Choose for a server on this machine's GPU, `otherwise` where there is no forecast. fields: of
    ServerArgs. model: SGLang's ModelConfig."""
    if config.kernels == "triton":
        return Choice(otherwise, "there are no figures for Triton kernels")
    if (product := torch.cuda.get_device_name()) not in PRODUCTS:
        return Choice(otherwise, f"there are no figures for {product}")
    if config.codec in UNTRIED_ON_GPU:
        return Choice(otherwise, f"there are no figures for {config.codec} on a GPU")
    if config.exact_residual == "packed" and config.frees_anchors:
        return Choice(otherwise, "there are no figures for packed residuals with freed anchors")
    try:
        return choose(_deployment(config, fields, model, PRODUCTS[product]))
    except ConfigError as error:
        # `plan` knows fewer models than the server, and says which.
        return Choice(otherwise, f"there is no forecast: {error}")


def _deployment(
    config: KVSpecConfig, fields: dict[str, Any], model: Any, device: str
) -> Deployment:
    """Return the deployment of a server. A form of residuals that is yet to be chosen counts as
    raw."""
    # The dtype that is served, whatever the model was saved in.
    dtype = str(model.dtype).removeprefix("torch.")
    shape = ModelShape.from_config(model.hf_text_config.to_dict() | {"dtype": dtype})
    # Codecs of other packages have no figures of their own.
    codec = config.codec if config.codec in MEASURED_ACCEPTANCE else "uniform4"
    is_raw = not config.host_gb or config.exact_residual == AUTO_RESIDUAL
    weights = config.draft_weights if config.weight_checkpoint is None else "int4"
    if model.dtype != torch.bfloat16:
        # with_weights() makes no copies of others.
        weights = "target"
    return Deployment(
        model=replace(shape, max_context=int(model.context_len)),
        device=DEVICES[device],
        curve=MEASURED_ACCEPTANCE[codec],
        codec=codec,
        target=config.target,
        tp=fields.get("tp_size") or 1,
        host_bytes=(config.host_gb or 0) * GIB,
        page_size=fields["page_size"],
        max_requests=fields["max_running_requests"],
        memory_share=fields.get("mem_fraction_static") or MEMORY_SHARE,
        max_draft_len=config.max_draft_len,
        draft_budget=config.asked_budget,
        draft_weights=cast("Weights", weights),
        exact_residual="raw" if is_raw else config.exact_residual,
    )
