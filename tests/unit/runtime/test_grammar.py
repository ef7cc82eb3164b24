"""Masks along a chain of drafts, from a grammar of a few words over a small vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.runtime.grammar import mask_after, masks_along

VOCAB = 5
EVERY_TOKEN = [True] * VOCAB
WORDS = ((0, 1, 2, 4), (0, 1, 3), (2, 2, 2, 2, 4), (3,))


class Words:
    """Grammar of the language WORDS, with the interface of SGLang's grammar back ends. Masks: [n,
    vocab] bool."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)
        self.finished = False

    def next_tokens(self) -> set[int]:
        n = len(self.tokens)
        return {word[n] for word in WORDS if list(word[:n]) == self.tokens and len(word) > n}

    def is_terminated(self) -> bool:
        return tuple(self.tokens) in WORDS

    def accept_token(self, token: int) -> None:
        if token not in self.next_tokens():
            raise ValueError(token)
        self.tokens.append(token)

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.tokens)
        del self.tokens[-count:]

    @staticmethod
    def allocate_vocab_mask(vocab: int, rows: int, device: torch.device) -> torch.Tensor:
        return torch.ones((rows, vocab), dtype=torch.bool, device=device)

    def fill_vocab_mask(self, mask: torch.Tensor, row: int) -> None:
        mask[row] = torch.tensor(self.mask())

    def mask(self) -> list[bool]:
        return [token in self.next_tokens() for token in range(VOCAB)]

    @staticmethod
    def move_vocab_mask(mask: torch.Tensor, device: torch.device) -> torch.Tensor:
        return mask.to(device)

    @staticmethod
    def apply_vocab_mask(logits: torch.Tensor, mask: torch.Tensor) -> None:
        logits.masked_fill_(~mask, float("-inf"))


@st.composite
def begun_words(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Draw tokens emitted so far, short of a whole word, and drafts that stay within the word."""
    word = list(draw(st.sampled_from(WORDS)))
    begun = draw(st.integers(0, len(word) - 1))
    return word[:begun], word[begun : draw(st.integers(begun, len(word) - 1))]


@given(begun=begun_words())
def test_the_mask_after_drafts_is_that_of_a_grammar_that_took_them(begun):
    emitted, drafts = begun
    grammar, logits = Words(*emitted), torch.randn((1, VOCAB))
    mask = mask_after(grammar, drafts, logits)
    assert mask.shape == (1, VOCAB)
    assert mask.dtype == torch.bool
    assert mask[0].tolist() == Words(*emitted, *drafts).mask()
    assert grammar.tokens == emitted, "the grammar must be left where it was"


@given(begun=begun_words())
def test_masks_along_drafts_are_those_after_each(begun):
    emitted, drafts = begun
    logits = torch.randn((len(drafts) + 1, VOCAB))
    masks = masks_along(Words(*emitted), drafts, logits)
    assert masks.max_tokens == len(drafts) + 1
    for count, row in enumerate(masks.allowed):
        after = mask_after(Words(*emitted), drafts[:count], logits[:1])
        assert row.tolist() == after[0].tolist()


@pytest.mark.parametrize(
    ("drafts", "max_tokens"),
    [
        # No word continues with 4, so the tokens behind it are never reached.
        ([0, 4, 1], 4),
        ([4], 2),
        # The word is complete, and tokens behind it are not part of the answer.
        ([0, 1, 3], 3),
        ([0, 1, 3, 0], 3),
    ],
)
def test_behind_a_forbidden_draft_or_the_end_nothing_is_constrained(drafts, max_tokens):
    grammar, logits = Words(), torch.zeros((1, VOCAB))
    assert mask_after(grammar, drafts, logits)[0].tolist() == EVERY_TOKEN
    masks = masks_along(grammar, drafts, logits.expand(len(drafts) + 1, -1))
    assert masks.max_tokens == max_tokens
    assert masks.allowed[0].tolist() == Words().mask()
    assert grammar.tokens == []


def test_without_a_grammar_or_after_its_end_everything_is_allowed():
    logits = torch.zeros((1, VOCAB))
    assert mask_after(None, [1, 2], logits) is None
    assert mask_after(Words(3), [1, 2], logits) is None
    done = Words()
    done.finished = True
    assert mask_after(done, [0], logits) is None


def test_logits_are_left_alone():
    logits = torch.randn((1, VOCAB))
    before = logits.clone()
    mask_after(Words(), [0, 1], logits)
    assert torch.equal(logits, before)
