"""Weights that drafts of a server read: the forecast of its model on its GPU decides."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from sglang_kvspec.core.config import AUTO_WEIGHTS, KVSpecConfig
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.units import GIB
from sglang_kvspec.planning.devices import DEVICES, MEMORY_SHARE, PRODUCTS
from sglang_kvspec.planning.forecast import MEASURED_ACCEPTANCE, Deployment
from sglang_kvspec.planning.model_shape import ModelShape
from sglang_kvspec.planning.weights_choice import WeightsChoice, choose_weights

logger = logging.getLogger(__name__)


def with_weights(
    config: KVSpecConfig, fields: dict[str, Any], model: Any, *, on_gpu: bool
) -> KVSpecConfig:
    """Return the configuration with the weights that --kvspec-draft-weights auto chooses, and log
    why. fields: of ServerArgs. model: SGLang's ModelConfig."""
    if config.draft_weights != AUTO_WEIGHTS:
        return config
    if not on_gpu:
        chosen = WeightsChoice("target", "on a CPU copies make drafts slower")
    elif model.dtype != torch.bfloat16:
        chosen = WeightsChoice("target", "the model is not in bf16")
    elif config.kernels == "triton":
        chosen = WeightsChoice("target", "there are no figures for Triton kernels")
    elif (product := torch.cuda.get_device_name()) not in PRODUCTS:
        chosen = WeightsChoice("target", f"there are no figures for {product}")
    else:
        try:
            chosen = choose_weights(_deployment(config, fields, model, PRODUCTS[product]))
        except ConfigError as error:
            # `plan` knows fewer models than the server, and says which.
            chosen = WeightsChoice("target", f"there is no forecast: {error}")
    logger.info("KVSpec: draft weights: %s, because %s", chosen.weights, chosen.reason)
    return replace(config, draft_weights=chosen.weights)


def _deployment(
    config: KVSpecConfig, fields: dict[str, Any], model: Any, device: str
) -> Deployment:
    """Raises ConfigError for a model that cannot be forecast."""
    shape = ModelShape.from_config(model.hf_text_config.to_dict())
    # Codecs of other packages, and those without kernels, have no figures of their own.
    codec = config.codec if config.codec in MEASURED_ACCEPTANCE else "uniform4"
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
        exact_residual=config.exact_residual if config.host_gb else "raw",
    )
