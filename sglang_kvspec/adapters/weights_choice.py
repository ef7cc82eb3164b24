"""Weights that drafts of a server read: the forecast of its model on its GPU decides."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from sglang_kvspec.adapters.deployment import deployment_of
from sglang_kvspec.core.config import AUTO_WEIGHTS, KVSpecConfig
from sglang_kvspec.core.errors import ConfigError
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
    else:
        try:
            chosen = choose_weights(deployment_of(config, fields, model))
        except ConfigError as error:
            chosen = WeightsChoice("target", str(error))
    logger.info("KVSpec: draft weights: %s, because %s", chosen.weights, chosen.reason)
    return replace(config, draft_weights=chosen.weights)
