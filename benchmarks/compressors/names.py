"""Names of the methods that figures are about."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvspec.planning.compressor_choice import ALL_TOKENS

# Drafts that read the model's own KV.
PLAIN = "plain"
# In a label of anchors: K is encoded in front of the rotary embedding, which no server does.
BEFORE_ROTARY = "before_rotary"
# Anchors that all methods are compared with, as --codecs and figures name them.
DENSE4, DENSE4_LABEL = "uniform4:4", "uniform4_4bit"


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the study. scorer, anchors: labels. budget: share of a prompt's units; 1 where
    drafts read all tokens."""

    scorer: str
    anchors: str
    budget: float

    @property
    def name(self) -> str:
        if self.scorer == ALL_TOKENS:
            return f"{ALL_TOKENS}.{self.anchors}"
        return f"{self.scorer}.{self.anchors}.{100 * self.budget:g}pct"

    @classmethod
    def of(cls, name: str) -> Method:
        """Return the method of a name."""
        scorer, anchors, *budget = name.split(".", 2)
        share = float(budget[0].removesuffix("pct")) / 100 if budget else 1.0
        return cls(scorer, anchors, share)
