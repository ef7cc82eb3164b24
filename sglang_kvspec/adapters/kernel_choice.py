"""Checks of --kvspec-kernels against a model and the GPU."""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import UnsupportedError


def check_kernels(
    config: KVSpecConfig, model: Any, codec: Codec, page_size: int, num_ranks: int
) -> None:
    """Raise UnsupportedError if CUDA kernels are asked for that do not cover the model.

    model: SGLang's ModelConfig. codec: bound to the model's sizes. num_ranks: ranks that share the
    heads.
    """
    if config.kernels != "cuda":
        return
    # Imported late: a CPU server loads no kernels.
    from kvspec_kernels.ops.cuda_coverage import uncovered

    missing = uncovered(
        codec.settings,
        config.target,
        page_size,
        model.head_dim,
        model.num_attention_heads // num_ranks,
        model.get_num_kv_heads(num_ranks),
        model.dtype,
        torch.device("cuda"),
    )
    if missing:
        raise UnsupportedError(
            f"--kvspec-kernels cuda cannot serve {model.model_path}: no CUDA kernel covers its "
            f"{' and '.join(missing)} (allowed: auto, triton)"
        )


def check_deterministic_sizes(model: Any, page_size: int) -> None:
    """Raise UnsupportedError if deterministic attention at the `exact` target does not fit the
    shared memory of a visible GPU.

    model: SGLang's ModelConfig.
    """
    from kvspec_kernels.ops.deterministic_attention import launch_of

    for index in range(torch.cuda.device_count()):
        try:
            launch_of(page_size, model.head_dim, model.dtype, torch.device("cuda", index))
        except ValueError as error:
            raise UnsupportedError(
                f"--page-size {page_size} cannot serve {model.model_path} with deterministic "
                f"attention: {error}"
            ) from error
