"""Products of deterministic inference: which go to the kernels, and what a start checks."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.ops import products
from kvspec_patches import matmul_persistent
from sglang_kvspec.adapters.products import check_products
from sglang_kvspec.core.errors import UnsupportedError


class Original:
    """Stand-in for SGLang's operator, whose kernel needs a GPU."""

    def __init__(self):
        self.calls = []

    def __call__(self, a, b, bias=None, out_dtype=None):
        self.calls.append((a, b, bias))
        out = torch.addmm(bias, a, b) if bias is not None else a @ b
        return out.to(out_dtype or out.dtype)


@pytest.fixture
def kernel_calls(monkeypatch):
    calls = []

    def record(rows, weight, bias):
        calls.append((rows, weight, bias))
        return rows @ weight.t()

    monkeypatch.setattr(products, "product", record)
    return calls


@pytest.mark.parametrize("num_rows", [0, 1, 100])
def test_weights_in_bf16_go_to_the_kernels(num_rows, kernel_calls):
    original, rows, weight = Original(), torch.ones(num_rows, 64).bfloat16(), torch.ones(8, 64)
    out = matmul_persistent.hook(original, rows, weight.bfloat16().t())
    assert out.shape == (num_rows, 8)
    assert not original.calls
    [(_, given, bias)] = kernel_calls
    assert given.shape == (8, 64)
    assert bias is None


@pytest.mark.parametrize("num_rows", [0, 1, 100])
def test_what_the_kernels_do_not_take_goes_to_sglang(num_rows, kernel_calls):
    """The choice does not depend on the number of rows, since the bits of a row must not."""
    original, rows, weight = Original(), torch.ones(num_rows, 64), torch.ones(64, 8)
    bias = torch.ones(8)
    out = matmul_persistent.hook(original, rows, weight, bias=bias)
    assert torch.equal(out, torch.full((num_rows, 8), 65.0))
    assert len(original.calls) == 1
    assert not kernel_calls


def test_an_output_of_another_dtype_comes_from_sglang(kernel_calls):
    original, rows = Original(), torch.ones(3, 64).bfloat16()
    weight = torch.ones(8, 64).bfloat16()
    out = matmul_persistent.hook(original, rows, weight.t(), out_dtype=torch.float32)
    assert torch.equal(out, torch.full((3, 8), 64.0))
    assert not kernel_calls


def test_a_start_stops_where_tiles_differ(monkeypatch):
    monkeypatch.setattr(products, "equal_tiles", lambda device, dtype: False)
    with pytest.raises(UnsupportedError, match="products of bfloat16 depend on the number of rows"):
        check_products(torch.device("cpu"), torch.bfloat16)
    # fp32 goes to SGLang's operator.
    check_products(torch.device("cpu"), torch.float32)


def test_a_start_goes_on_where_tiles_are_equal(monkeypatch):
    monkeypatch.setattr(products, "equal_tiles", lambda device, dtype: True)
    check_products(torch.device("cpu"), torch.bfloat16)
