"""Form of a server's residuals outside of its KV cache: the forecast of its model decides."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from sglang_kvspec.adapters.deployment import choose_by_forecast
from sglang_kvspec.core.config import AUTO_RESIDUAL, ExactResidual, KVSpecConfig
from sglang_kvspec.core.flag_needs import Server, can_pack_residuals, is_split_over_servers
from sglang_kvspec.planning.gains import Choice
from sglang_kvspec.planning.residual_choice import choose_residual

logger = logging.getLogger(__name__)


def with_residual_form(
    config: KVSpecConfig, fields: dict[str, Any], model: Any, *, on_gpu: bool
) -> KVSpecConfig:
    """Return the configuration with the form that --kvspec-exact-residual auto chooses, and log
    why. fields: of ServerArgs. model: SGLang's ModelConfig."""
    if config.exact_residual != AUTO_RESIDUAL:
        return config
    chosen: Choice[ExactResidual]
    if not on_gpu:
        chosen = Choice("raw", "a CPU takes longer to pack than fewer bytes save")
    elif not can_pack_residuals(config):
        chosen = Choice("raw", "packing needs uniform4 anchors of 4 bits")
    elif config.frees_anchors:
        chosen = Choice("raw", "no forecast knows packed residuals beside freed anchors")
    elif config.keeps_prefixes or is_split_over_servers(config, Server(fields, memory_gib=0)):
        chosen = Choice("raw", "prefix tiers and transfers share pages of one form")
    else:
        chosen = choose_by_forecast(choose_residual, "raw", config, fields, model)
    logger.info("KVSpec: exact residuals: %s, because %s", chosen.value, chosen.reason)
    return replace(config, exact_residual=chosen.value)
