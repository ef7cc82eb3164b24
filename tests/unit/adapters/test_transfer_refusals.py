"""Refusals of a prefill and a decode server, and requests that they accept."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams

from sglang_kvspec.adapters.transfer.refusals import check_transferred

TAKEN = {"input_ids": [1, 2], "bootstrap_host": "127.0.0.1", "sampling_params": {"n": 1}}


def request(**fields: Any) -> GenerateReqInput:
    made = GenerateReqInput(**{**TAKEN, **fields})
    made.normalize_batch_and_arguments()
    return made if made.is_single else made[0]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sampling_params": {}},
        {"return_logprob": True, "top_logprobs_num": 128},
        {"return_logprob": True, "logprob_start_len": 0},
        # These fields have no effect without return_logprob.
        {"top_logprobs_num": 129, "token_ids_logprob": [5]},
    ],
    ids=str,
)
def test_takes(fields: dict[str, Any]) -> None:
    check_transferred(request(**fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bootstrap_host": None}, "bootstrap_host is missing"),
        ({"bootstrap_host": ""}, "bootstrap_host is missing"),
        ({"session_params": SessionParams(id="7")}, "session_params cannot be combined"),
        ({"input_ids": None, "input_embeds": [[0.0]]}, "input_embeds cannot be combined"),
        ({"sampling_params": {"n": 2}}, "n > 1 cannot be combined"),
        (
            {"return_logprob": True, "token_ids_logprob": [5]},
            "token_ids_logprob cannot be combined",
        ),
        ({"return_logprob": True, "top_logprobs_num": 129}, "at most 128 .*, got 129"),
    ],
    ids=str,
)
def test_refuses(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_transferred(request(**fields))
