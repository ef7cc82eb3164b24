"""Second moments of the inputs of linear layers, by which weights are rounded to 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class InputMoments(TorchFunctionMode):
    """While in force, sums x^T x of the inputs x [tokens, K] of every F.linear. by_weight: sums
    [K, K] fp32, by the id of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.by_weight: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear:
            x, weight = args[0].flatten(0, -2), args[1]
            moment = x.t() @ x
            self.by_weight[id(weight)] = self.by_weight.get(id(weight), 0) + moment
        return func(*args, **(kwargs or {}))
