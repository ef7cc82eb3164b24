"""Weights in two parts: exact together, near with the first one alone, or refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from acceptance.draft_weights import with_weights
from safetensors.torch import load_file
from two_parts.parts import MOST_SMALL, decode, decode_first, encode

ROOT = Path(__file__).parents[3]
MODELS = (
    ROOT / "models" / "demo-5m",
    ROOT.parent / "shared" / "models" / "eval-31m",
    ROOT / ".kvspec" / "models" / "smollm2-135m",
)
BF16 = torch.bfloat16


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


def random_bits(num_rows: int, num_inputs: int, low: int, high: int) -> torch.Tensor:
    """Return bf16 numbers with every sign and mantissa, and exponents from low to high."""
    rng = torch.Generator().manual_seed(0)
    size = (num_rows, num_inputs)
    sign = torch.randint(2, size, generator=rng) << 15
    exponent = torch.randint(low, high + 1, size, generator=rng) << 7
    bits = sign | exponent | torch.randint(128, size, generator=rng)
    return bits.to(torch.int16).view(BF16)


@pytest.mark.parametrize(("num_rows", "num_inputs"), [(1, 1), (3, 7), (40, 2000)])
@pytest.mark.parametrize("high", [17, 120, 254])
def test_bits_come_back(num_rows, num_inputs, high):
    weight = random_bits(num_rows, num_inputs, high - 15, high)
    weight[:, 0] = random_bits(num_rows, 1, high, high)[:, 0]
    parts = encode(weight)
    assert len(parts.small) == 0
    assert same_bits(decode(parts), weight)


def test_rows_have_exponents_of_their_own():
    weight = torch.cat([random_bits(2, 100, high - 15, high) for high in (20, 250, 127)])
    assert same_bits(decode(encode(weight)), weight)


def test_smaller_values_and_zeros_are_listed():
    weight = random_bits(9, 300, 110, 120)
    weight[4] = 0.0
    weight[4, 1] = -0.0
    weight[2, 5:9] = torch.tensor([0.0, -0.0, 2.0**-133, -(2.0**-60)])
    weight[8, 299] = 2.0**-40
    parts = encode(weight)
    assert parts.small.shape == (4, 9)
    assert int((parts.small_at >= 0).sum()) == 5
    assert same_bits(decode(parts), weight)


def test_the_first_part_is_within_half_of_the_second():
    """Half of the second part is 8 of 128 steps of a mantissa."""
    weight = random_bits(40, 2000, 100, 115).float()
    error = decode_first(encode(weight.bfloat16())) - weight
    exponent = torch.exp2(weight.abs().log2().floor())
    assert bool((error.abs() <= exponent * 8 / 128).all())
    # The middle is rounded up by half a step.
    assert float((error / exponent * weight.sign()).mean()) == pytest.approx(0.5 / 128, rel=0.1)


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_models_fit(folder):
    if not folder.exists():
        pytest.skip(f"{folder} is not here")
    stored = plain = 0
    for path in folder.glob("*.safetensors"):
        for name, weight in load_file(path).items():
            if weight.ndim == 2:
                exact = weight.bfloat16()
                parts = encode(exact)
                assert same_bits(decode(parts), exact), name
                stored, plain = stored + parts.nbytes, plain + exact.nbytes
    # 12 of 16 bits, and lists that have the length of the longest one.
    assert 0.75 < stored / plain < 0.82


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite_are_refused(value):
    weight = random_bits(3, 10, 110, 120)
    weight[1, 3] = value
    with pytest.raises(ValueError, match="must be finite"):
        encode(weight)


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must be bf16"):
        encode(torch.ones(2, 2))
    with pytest.raises(ValueError, match="no value of 2"):
        encode(random_bits(3, 10, 0, 16))
    weight = random_bits(3, 100, 110, 120)
    weight[1, : MOST_SMALL + 1] = 0.0
    with pytest.raises(ValueError, match="65 values below 16 binades, at most 64"):
        encode(weight)
    weight[1, 0] = 1.0
    with pytest.raises(ValueError, match="values below 16 binades"):
        encode(weight)


def test_drafts_of_a_model_read_first_parts():
    weight = random_bits(8, 64, 100, 115).float()
    model = SimpleNamespace(weights={"q_proj.weight": weight, "norm.weight": weight})
    drafter = with_weights(model, "first_part", None)
    assert drafter.weights["norm.weight"] is weight
    assert torch.equal(drafter.weights["q_proj.weight"], decode_first(encode(weight.bfloat16())))
    assert model.weights["q_proj.weight"] is weight
