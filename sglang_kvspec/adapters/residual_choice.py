"""Form of a server's residuals outside of its KV cache: the forecast of its model decides."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from sglang_kvspec.adapters.deployment import deployment_of
from sglang_kvspec.core.config import AUTO_RESIDUAL, KVSpecConfig
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.flag_needs import DISAGGREGATION_ROLES, can_pack_residuals
from sglang_kvspec.planning.residual_choice import ResidualChoice, choose_residual

logger = logging.getLogger(__name__)


def with_residual_form(
    config: KVSpecConfig, fields: dict[str, Any], model: Any, *, on_gpu: bool
) -> KVSpecConfig:
    """Return the configuration with the form that --kvspec-exact-residual auto chooses, and log
    why. fields: of ServerArgs. model: SGLang's ModelConfig."""
    if config.exact_residual != AUTO_RESIDUAL:
        return config
    if not on_gpu:
        chosen = ResidualChoice("raw", "a CPU takes longer to pack than fewer bytes save")
    elif not can_pack_residuals(config):
        chosen = ResidualChoice("raw", "packing needs the 4-bit uniform4 anchors of every page")
    elif config.keeps_prefixes or fields.get("disaggregation_mode") in DISAGGREGATION_ROLES:
        chosen = ResidualChoice("raw", "prefix tiers and transfers share pages of one form")
    else:
        try:
            chosen = choose_residual(deployment_of(config, fields, model))
        except ConfigError as error:
            chosen = ResidualChoice("raw", str(error))
    logger.info("KVSpec: exact residuals: %s, because %s", chosen.form, chosen.reason)
    return replace(config, exact_residual=chosen.form)
