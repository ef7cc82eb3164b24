"""Decoded anchors are kept, and are decoded again only after the page was freed."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.kv.decoded_anchors import DecodedAnchors
from sglang_kvspec.kv.geometry import KVGeometry

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=16, page_size=32, dtype=torch.float32)


class Decoder:
    """Decoder that fills pages with page + 0.5 (k) and its negative (v), and records its calls."""

    def __init__(self):
        self.asked: list[list[int]] = []

    def __call__(self, pages):
        self.asked.append(pages.tolist())
        value = (pages.float() + 0.5)[:, None, None, None].expand(-1, 32, 1, 16)
        return value.clone(), -value


@pytest.fixture
def decoder():
    return Decoder()


def values(kv):
    assert torch.equal(kv[0], -kv[1])
    return kv[0][:, 0, 0, 0].tolist()


def test_decodes_each_page_of_each_layer_once(decoder):
    anchors = DecodedAnchors(GEOMETRY, 4)
    assert values(anchors.read(0, torch.tensor([3, 1]), decoder)) == [3.5, 1.5]
    assert values(anchors.read(0, torch.tensor([1, 2, 3]), decoder)) == [1.5, 2.5, 3.5]
    assert values(anchors.read(1, torch.tensor([1]), decoder)) == [1.5]
    assert decoder.asked == [[3, 1], [2], [1]]


def test_a_forgotten_page_is_decoded_again_in_every_layer(decoder):
    anchors = DecodedAnchors(GEOMETRY, 4)
    both = torch.tensor([1, 2])
    for layer in (0, 1):
        anchors.read(layer, both, decoder)
    anchors.forget(2)
    for layer in (0, 1):
        anchors.read(layer, both, decoder)
    assert decoder.asked == [[1, 2], [1, 2], [2], [2]]


def test_what_is_read_belongs_to_the_reader(decoder):
    anchors = DecodedAnchors(GEOMETRY, 4)
    anchors.read(0, torch.tensor([1]), decoder)[0].zero_()
    assert values(anchors.read(0, torch.tensor([1]), decoder)) == [1.5]


def test_beyond_its_memory_limit_it_keeps_nothing(decoder):
    limit = 5 * GEOMETRY.plain_page_bytes
    assert DecodedAnchors(GEOMETRY, 4, limit).enabled
    anchors = DecodedAnchors(GEOMETRY, 5, limit)
    assert not anchors.enabled
    for _ in range(2):
        assert values(anchors.read(0, torch.tensor([5]), decoder)) == [5.5]
    anchors.forget(5)
    assert decoder.asked == [[5], [5]]


def test_reading_nothing_decodes_nothing(decoder):
    k, v = DecodedAnchors(GEOMETRY, 4).read(0, torch.empty(0, dtype=torch.int64), decoder)
    assert k.shape == v.shape == (0, 32, 1, 16)
    assert decoder.asked == []
