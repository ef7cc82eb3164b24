"""Chunks of a context, counted from its first token. Deterministic attention attends to each on its
own and merges them in order."""

from __future__ import annotations

# Shorter chunks would leave many parts to merge, and longer ones few programs for few requests.
CHUNK_TOKENS = 4096


def chunk_blocks(block_tokens: int) -> int:
    """Return the blocks of a chunk, such as pages, that have block_tokens tokens each."""
    return max(CHUNK_TOKENS // block_tokens, 1)
