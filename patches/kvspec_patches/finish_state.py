"""Req.update_finish_state: checks a verified run token by token, as plain decoding would.

SGLang 0.5.17 checks the whole run at once. The length limit then hides a stop token or string that
came before it in the same run. A run of length 0 rescans all output (`output_ids[-0:]`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., None], self: Any, new_accepted_len: int = 1) -> None:
    if new_accepted_len == 0:
        # An abort must still take effect; everything else needs a token.
        if self.to_finish:
            original(self, 1)
        return
    if new_accepted_len == 1 or self.finished() or self.to_finish:
        original(self, new_accepted_len)
        return
    _check_in_token_order(original, self, new_accepted_len)


def _check_in_token_order(original: Callable[..., None], req: Any, new_accepted_len: int) -> None:
    """Show `original` the output as it was after each token of the run.

    The output keeps all tokens of the run, since their KV is committed; `finished_len` cuts what
    the user sees.
    """
    num_before = len(req.output_ids) - new_accepted_len
    run = req.output_ids[num_before:]
    grammar = req.grammar
    del req.output_ids[num_before:]
    try:
        # The grammar has seen the whole run already: it may end a request at the last token only.
        req.grammar = None
        for index, token in enumerate(run):
            if index == new_accepted_len - 1:
                req.grammar = grammar
            req.output_ids.append(token)
            original(req, 1)
            if req.finished():
                break
    finally:
        req.grammar = grammar
        num_seen = len(req.output_ids)
        req.output_ids.extend(run[num_seen - num_before :])
    if req.finished() and req.finished_len is None:
        req.finished_len = num_seen
