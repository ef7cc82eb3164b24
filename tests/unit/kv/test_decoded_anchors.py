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


def read(anchors, layer, pages, decoder):
    into = tuple(torch.empty(len(pages), 32, 1, 16) for _ in range(2))
    anchors.read(layer, torch.tensor(pages, dtype=torch.int64), decoder, into)
    return into


def values(kv):
    assert torch.equal(kv[0], -kv[1])
    return kv[0][:, 0, 0, 0].tolist()


def test_decodes_each_page_of_each_layer_once(decoder):
    anchors = DecodedAnchors(GEOMETRY, 4)
    assert values(read(anchors, 0, [3, 1], decoder)) == [3.5, 1.5]
    assert values(read(anchors, 0, [1, 2, 3], decoder)) == [1.5, 2.5, 3.5]
    assert values(read(anchors, 1, [1], decoder)) == [1.5]
    assert decoder.asked == [[3, 1], [2], [1]]


def test_a_forgotten_page_is_decoded_again_in_every_layer(decoder):
    anchors = DecodedAnchors(GEOMETRY, 4)
    for layer in (0, 1):
        read(anchors, layer, [1, 2], decoder)
    anchors.forget(2)
    for layer in (0, 1):
        read(anchors, layer, [1, 2], decoder)
    assert decoder.asked == [[1, 2], [1, 2], [2], [2]]


def test_what_is_read_belongs_to_the_reader(decoder):
    anchors = DecodedAnchors(GEOMETRY, 4)
    read(anchors, 0, [1], decoder)[0].zero_()
    assert values(read(anchors, 0, [1], decoder)) == [1.5]


def test_beyond_its_memory_limit_the_page_read_longest_ago_goes(decoder):
    anchors = DecodedAnchors(GEOMETRY, 9, 2 * GEOMETRY.plain_page_bytes)
    for page in (5, 6, 5, 7):
        assert values(read(anchors, 0, [page], decoder)) == [page + 0.5]
    assert decoder.asked == [[5], [6], [7]]
    # Page 7 has the slot of page 6.
    assert values(read(anchors, 0, [7, 5], decoder)) == [7.5, 5.5]
    assert values(read(anchors, 0, [6], decoder)) == [6.5]
    assert decoder.asked == [[5], [6], [7], [6]]


def test_a_slot_that_changes_hands_is_decoded_again_in_every_layer(decoder):
    anchors = DecodedAnchors(GEOMETRY, 9, GEOMETRY.plain_page_bytes)
    for page in (1, 2):
        for layer in (0, 1):
            assert values(read(anchors, layer, [page], decoder)) == [page + 0.5]
    assert decoder.asked == [[1], [1], [2], [2]]


def test_a_read_of_more_pages_than_slots_keeps_nothing(decoder):
    anchors = DecodedAnchors(GEOMETRY, 9, GEOMETRY.plain_page_bytes)
    read(anchors, 0, [1], decoder)
    for _ in range(2):
        assert values(read(anchors, 0, [1, 2], decoder)) == [1.5, 2.5]
    read(anchors, 0, [1], decoder)
    assert decoder.asked == [[1], [1, 2], [1, 2]]


def test_reading_nothing_decodes_nothing(decoder):
    k, v = read(DecodedAnchors(GEOMETRY, 4), 0, [], decoder)
    assert k.shape == v.shape == (0, 32, 1, 16)
    assert decoder.asked == []
