"""The fused append: tokens in their places, and pages encoded as encode_pages does it."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.formats import Log4Settings, Uniform4Settings
from kvspec_kernels.ops.append import append
from kvspec_testkit.kernels.encoding import encode_by_reference
from kvspec_testkit.kernels.interpreter import teach_interpreter

teach_interpreter()

SETTINGS = {"log4": Log4Settings, "uniform4": Uniform4Settings}
POISON = 0xA5
PAGE, HEADS, HEAD_DIM, SLOTS = 32, 2, 16, 4

by_codec = pytest.mark.parametrize("codec", list(SETTINGS))
by_target = pytest.mark.parametrize("target", ["int8", "exact"])


class Case:
    """A window of random pages, poisoned pools, and what they hold after a reference append."""

    def __init__(
        self,
        codec,
        target,
        device,
        rows,
        dtype=torch.bfloat16,
        head_dim=HEAD_DIM,
        heads=HEADS,
        bits=4,
    ):
        """rows: (slot, offset, encode source, anchor slot, residual slot) each."""
        rng = torch.Generator().manual_seed(0)
        self.settings, self.target = SETTINGS[codec].for_page(PAGE, bits), target
        shape = (2, SLOTS, PAGE, heads, head_dim)
        window = torch.randn(shape, generator=rng).to(dtype)
        new = torch.randn((2, len(rows), heads, head_dim), generator=rng).to(dtype)
        # Slices of fused tensors, as projections return them.
        self.k_new, self.v_new = new.transpose(0, 1).contiguous().to(device).unbind(1)
        self.k, self.v = (part.clone().to(device) for part in window)
        self.wanted = window.clone()
        for row, (slot, offset, *_) in enumerate(rows):
            if slot >= 0:
                self.wanted[:, slot, offset] = new[:, row]
        records = encode_by_reference(*self.wanted, self.settings, target)
        self.pools = [
            torch.full((6, *r.shape[1:]), POISON, dtype=torch.uint8, device=device) for r in records
        ]
        self.wanted_pools = [pool.cpu().clone() for pool in self.pools]
        for _, _, source, *places in rows:
            if source >= 0:
                for pool, place, encoded in zip(self.wanted_pools, places, records, strict=True):
                    pool[place] = encoded[source]
        columns = zip(*rows, strict=True)
        self.indices = [torch.tensor(column, device=device) for column in columns]

    def run(self):
        slots, offsets, sources, anchor_slots, residual_slots = self.indices
        tokens = (self.k_new, self.v_new, self.k, self.v, slots, offsets, sources)
        pools = (self.pools[0], anchor_slots, self.pools[1], residual_slots)
        append(*tokens, *pools, self.settings, self.target)

    def check(self):
        for got, want in zip((self.k, self.v, *self.pools), self.expected(), strict=True):
            assert torch.equal(got.cpu(), want)

    def expected(self):
        return (*self.wanted, *self.wanted_pools)


@by_codec
def test_tokens_and_padding(codec, device):
    case = Case(codec, "exact", device, [(2, 5, -1, 0, 0), (-1, 7, -1, 1, 1), (0, 31, -1, 2, 2)])
    case.run()
    case.check()


@by_codec
@by_target
def test_a_page_is_encoded_with_the_token_that_completes_it(codec, target, device):
    rows = [(1, PAGE - 1, 1, 4, 2), (0, 3, -1, 0, 0)]
    case = Case(codec, target, device, rows)
    case.run()
    case.check()


@by_codec
@by_target
def test_two_bit_anchors(codec, target, device):
    rows = [(1, PAGE - 1, 1, 4, 2), (0, 3, -1, 0, 0)]
    case = Case(codec, target, device, rows, head_dim=32, heads=1, bits=2)
    case.run()
    case.check()


@by_codec
def test_an_older_page_is_encoded_without_a_token(codec, device):
    case = Case(codec, "int8", device, [(-1, 0, 3, 5, 0), (2, 0, 0, 1, 3)])
    case.run()
    case.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [48, 128])
def test_other_dtypes_and_head_sizes(dtype, head_dim, device):
    rows = [(1, PAGE - 1, 1, 0, 0)]
    case = Case("log4", "exact", device, rows, dtype=dtype, head_dim=head_dim, heads=1)
    case.run()
    case.check()


def test_no_rows(device):
    case = Case("log4", "exact", device, [(1, 0, -1, 0, 0)])
    case.k_new, case.v_new = case.k_new[:0], case.v_new[:0]
    case.indices = [index[:0] for index in case.indices]
    before = case.k.clone()
    case.run()
    assert torch.equal(case.k, before)


def test_what_does_not_fit_is_refused(device):
    case = Case("log4", "exact", device, [(1, 0, -1, 0, 0)])
    case.k_new = case.k_new.float()
    with pytest.raises(ValueError, match=r"k_new must be torch.bfloat16 \[rows, 2, 16\]"):
        case.run()
    case = Case("log4", "exact", device, [(1, 0, -1, 0, 0)])
    case.indices[1] = case.indices[1].repeat(2)
    with pytest.raises(ValueError, match=r"offsets must be contiguous \[1\]"):
        case.run()
    case = Case("log4", "exact", device, [(1, 0, -1, 0, 0)] * 2)
    case.v_new = case.v_new.contiguous()
    with pytest.raises(ValueError, match="must agree"):
        case.run()


@pytest.mark.gpu
@by_codec
def test_replay_in_a_graph_encodes_other_rows(codec, device):
    """Captured with nothing to encode, replayed with a full page."""
    rows = [(1, PAGE - 1, 1, 4, 2), (-1, 0, -1, 0, 0), (0, 3, 2, 1, 0)]
    case = Case(codec, "exact", device, rows, heads=8, head_dim=128)
    before = [tensor.clone() for tensor in (case.k, case.v, *case.pools, *case.indices)]
    nothing = [torch.full_like(index, -1) for index in case.indices]
    for index, idle in zip(case.indices, nothing, strict=True):
        index.copy_(idle)
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    for tensor, saved in zip((case.k, case.v, *case.pools, *case.indices), before, strict=True):
        tensor.copy_(saved)
    graph.replay()
    case.check()


@pytest.mark.gpu
@by_codec
@by_target
def test_many_rows(codec, target, device):
    """Every row completes the page that it has encoded, many times over: a missing barrier shows
    as an old token in a record."""
    rows = [(slot, PAGE - 1, slot, slot, 5 - slot) for slot in range(SLOTS)]
    for head_dim in (64, 128, 256):
        for _ in range(20):
            case = Case(codec, target, device, rows, heads=8, head_dim=head_dim)
            case.run()
            case.check()
