"""Memory of partial results of deterministic attention."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_kvspec.runtime.targets.deterministic import MOST_BYTES, Scratch

PAGE_SIZE, NUM_HEADS, HEAD_DIM = 64, 8, 128
CHUNK_PAGES = 64


def make_scratch():
    geometry = SimpleNamespace(page_size=PAGE_SIZE, head_dim=HEAD_DIM)
    return Scratch(SimpleNamespace(geometry=geometry, device=torch.device("cpu")), NUM_HEADS)


def test_parts_have_a_place_for_each_chunk():
    scratch = make_scratch()
    for num_pages, chunks in ((0, 1), (1, 1), (CHUNK_PAGES, 1), (CHUNK_PAGES + 1, 2)):
        parts = scratch.parts(3, num_pages)
        assert parts.shape == (3, chunks, NUM_HEADS, HEAD_DIM + 2)
        assert parts.dtype == torch.float32


def test_memory_is_shared_until_it_must_grow():
    scratch = make_scratch()
    large = scratch.parts(5, 1)
    assert scratch.parts(2, 1).data_ptr() == large.data_ptr()
    large.fill_(7)
    grown = scratch.parts(6, 1)
    assert grown.data_ptr() != large.data_ptr()
    # A graph that was captured with the former memory still has it.
    assert large.eq(7).all()


def test_too_much_memory_is_not_taken():
    token_bytes = NUM_HEADS * (HEAD_DIM + 2) * 4
    most = MOST_BYTES // token_bytes
    scratch = make_scratch()
    assert scratch.parts(1, (most + 1) * CHUNK_PAGES) is None
    assert scratch.parts(1, 1) is not None
