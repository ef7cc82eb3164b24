"""Ridge regression by sums that grow batch by batch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Linear(NamedTuple):
    """Map from x to weight @ x + bias. weight: [num_outputs, num_inputs]; bias: [num_outputs]; both
    float32."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight.T)


class RidgeSums:
    """Sums in float64 over pairs of inputs and outputs, which determine a linear map."""

    def __init__(self, num_inputs: int, num_outputs: int, device: torch.device) -> None:
        # A constant input stands for the bias.
        size = num_inputs + 1
        self._inputs = torch.zeros(size, size, dtype=torch.float64, device=device)
        self._products = torch.zeros(size, num_outputs, dtype=torch.float64, device=device)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add pairs x [n, num_inputs], y [n, num_outputs]."""
        ones = x.new_ones(len(x), 1)
        extended = torch.cat((x, ones), dim=1).double()
        self._inputs += extended.T @ extended
        self._products += extended.T @ y.double()

    def solve(self, penalty: float) -> Linear:
        """Return the map with the least squared error. penalty: of the squared weights, relative to
        the mean square of an input; biases are free."""
        added = penalty * self._inputs.diagonal()[:-1].mean()
        diagonal = torch.full_like(self._inputs.diagonal(), float(added))
        diagonal[-1] = 0.0
        solved = torch.linalg.solve(self._inputs + diagonal.diag(), self._products)
        return Linear(solved[:-1].T.float().contiguous(), solved[-1].float())


class Explained:
    """Share of the variance of outputs that predictions explain (R²), batch by batch."""

    def __init__(self, num_outputs: int, device: torch.device) -> None:
        # Rows: number, sum, sum of squares, and squared error.
        self._sums = torch.zeros(4, num_outputs, dtype=torch.float64, device=device)

    def add(self, predicted: torch.Tensor, y: torch.Tensor) -> None:
        """Add pairs [n, num_outputs]."""
        y = y.double()
        error = (predicted.double() - y).square().sum(0)
        count = torch.full_like(error, len(y))
        self._sums += torch.stack((count, y.sum(0), y.square().sum(0), error))

    def shares(self) -> torch.Tensor:
        """Return R² of each output, [num_outputs] float64."""
        count, total, squares, error = self._sums
        return 1 - error / (squares - total.square() / count)
