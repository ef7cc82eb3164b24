"""Weights that drafts of a server read: the forecast of its model on its GPU decides."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from sglang_kvspec.adapters.deployment import choose_by_forecast
from sglang_kvspec.core.config import AUTO_WEIGHTS, KVSpecConfig, Weights
from sglang_kvspec.planning.gains import Choice
from sglang_kvspec.planning.weights_choice import choose_weights

logger = logging.getLogger(__name__)


def with_weights(
    config: KVSpecConfig, fields: dict[str, Any], model: Any, *, on_gpu: bool
) -> KVSpecConfig:
    """Return the configuration with the weights that --kvspec-draft-weights auto chooses, and log
    why. fields: of ServerArgs. model: SGLang's ModelConfig."""
    if config.draft_weights != AUTO_WEIGHTS:
        return config
    chosen: Choice[Weights]
    if not on_gpu:
        chosen = Choice("target", "on a CPU copies make drafts slower")
    elif model.dtype != torch.bfloat16:
        chosen = Choice("target", "the model is not in bf16")
    else:
        chosen = choose_by_forecast(choose_weights, "target", config, fields, model)
    logger.info("KVSpec: draft weights: %s, because %s", chosen.value, chosen.reason)
    return replace(config, draft_weights=chosen.value)
