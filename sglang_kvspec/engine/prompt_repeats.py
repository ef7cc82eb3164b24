"""Prompts that the model reads a second time, for scorers that learn from that."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import ModelForward
from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.runtime.request_state import RequestState

# Tokens of a forward that repeats a part of a prompt, and the fewest for which it pays.
PIECE, LEAST_PIECE = 512, 256
# Tokens that are repeated behind one prefill, on a CPU and on a GPU. All requests wait meanwhile,
# and SGLang's watchdog stops a server whose step takes minutes.
MOST_REPEATED, MOST_REPEATED_ON_GPU = 8192, 16384
# Tokens before a piece that its forward begins with, so that its first tokens are expected.
LEAD = 8


class PromptRepeats:
    """Forwards behind a prefill that run the tokens of each prompt again, behind the prompt.

    The model then attends to what it needs to reproduce the prompt (KVzip, section 3.1, which asks
    for that in words; here the tokens follow without). Nothing of it is stored.
    """

    def __init__(
        self,
        forward: ModelForward,
        most_positions: int,
        least_piece: int = LEAST_PIECE,
        most_tokens: int = MOST_REPEATED,
    ) -> None:
        """most_positions: positions that the model allows. least_piece: positions that must be left
        behind a longer prompt. most_tokens: tokens of all prompts of a prefill together."""
        self._forward, self._most_positions = forward, most_positions
        self._least_piece, self._most_tokens = least_piece, most_tokens

    def run(self, batch: RoundBatch, complete: Iterable[int]) -> None:
        """Repeat the prompts of requests `complete` of a batch, unless they are too long for that.
        Leaves states as they are."""
        left = self._most_tokens
        for index in complete:
            state = batch.states[index]
            tokens = [*state.prompt, *state.output][: state.committed_len]
            room = min(PIECE, self._most_positions - len(tokens))
            if len(tokens) > left or room < min(self._least_piece, len(tokens)):
                continue
            left -= len(tokens)
            for piece in pieces(tokens, room):
                again = RequestState(
                    state.rid, len(tokens), piece[0], [], state.params, 1, drafts=piece[1:]
                )
                states = [*batch.states]
                states[index] = again
                row = Row(RowKind.REPEAT, len(tokens), len(piece), batch.pages[index])
                repeated = RoundBatch(states, batch.pages, batch.handles, batch.source)
                self._forward.run(repeated, {index: row})


def pieces(tokens: list[int], room: int) -> Iterable[list[int]]:
    """Split a prompt into pieces of at most `room` tokens. Each but the first begins with the last
    LEAD tokens of the piece before it."""
    step = max(1, room - LEAD)
    for begin in range(0, len(tokens), step):
        yield tokens[max(0, begin - LEAD) : begin + step]
