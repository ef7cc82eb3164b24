"""batch_invariant_ops.matmul_persistent: products of deterministic inference by KVSpec's kernels.

SGLang 0.5.17 multiplies by tiles of 128 x 128 for any number of rows, if DeepGEMM is not installed:
4096 columns keep 32 of 132 multiprocessors of a GPU at work. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def hook(original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    from sglang_kvspec.adapters.products import product

    return product(original, *args, **kwargs)
