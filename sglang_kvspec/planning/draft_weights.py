"""Expected cost and loss of drafts with weights in 4 bits."""

from __future__ import annotations

# Bits of a copied weight: its code, and its share of a group's scale and zero.
INT4_BITS = 4.5
# Time of the products of an 8B layer with weights in 4 bits, relative to bf16, by rows: on an H200
# (benchmarks/results/int4_products.json). An H100 gains more, since it reads bf16 more slowly.
# Drafts of more rows use the model's own weights.
INT4_TIMES = (
    (1, 0.453),
    (4, 0.470),
    (8, 0.493),
    (16, 0.581),
    (32, 0.718),
    (48, 0.859),
    (64, 0.868),
)
# Chance that a draft which the target would accept from its own weights is accepted from 4 bits
# too, that of the vocabulary projection among them: of rounds of 16 drafts of eval-31m 0.957 of the
# accepted ones are left (benchmarks/results/draft_weights_vocabulary_eval31m_2k.json).
INT4_KEPT = 0.9947


def int4_time(num_rows: float) -> float:
    """Return the time of the products of a draft step where drafts may read 4 bits, relative to
    bf16."""
    return next((time for most, time in INT4_TIMES if num_rows <= most), 1.0)
