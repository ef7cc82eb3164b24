"""Accepted and rejected drafts in the usage of OpenAI answers, under OpenAI's own names."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from sglang_kvspec.adapters.compat.openai import details_model, protocol

FIELD = "completion_tokens_details"
# Models of SGLang whose serializers hold a copy of UsageInfo's.
_ANSWERS = (
    protocol.CompletionResponse,
    protocol.CompletionStreamResponse,
    protocol.ChatCompletionResponse,
    protocol.ChatCompletionStreamResponse,
)


class DraftDetails(details_model()):  # type: ignore[misc]
    """SGLang's details of completion tokens, if it has any, and the drafts."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class CountedTokens(int):
    """Completion tokens of one answer that carry the counts of its drafts.

    SGLang passes only this number to the code that makes the usage of a stream.
    """

    accepted: int
    rejected: int

    @classmethod
    def of(cls, num_tokens: int, *, drafted: int, accepted: int) -> CountedTokens:
        counted = cls(num_tokens)
        counted.accepted, counted.rejected = accepted, drafted - accepted
        return counted


def add_drafts(usage: Any, completion_tokens: Iterable[int]) -> None:
    """Add the drafts of all answers to a UsageInfo; do nothing if no answer counted them."""
    counted = [tokens for tokens in completion_tokens if isinstance(tokens, CountedTokens)]
    if not counted:
        return
    _allow_details()
    known = getattr(usage, FIELD, None)
    details = DraftDetails(
        **({} if known is None else known.model_dump()),
        accepted_prediction_tokens=sum(tokens.accepted for tokens in counted),
        rejected_prediction_tokens=sum(tokens.rejected for tokens in counted),
    )
    setattr(usage, FIELD, details)


@cache
def _allow_details() -> None:
    """Let SGLang's UsageInfo have drafts among the details, a field that it lacks until 0.5.22."""
    fields = protocol.UsageInfo.model_fields
    others = fields[FIELD].annotation if FIELD in fields else None
    fields[FIELD] = FieldInfo(annotation=DraftDetails | others, default=None)
    for model in (protocol.UsageInfo, *_ANSWERS):
        model.model_rebuild(force=True)
