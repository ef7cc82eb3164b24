"""Comparison of answers with their references, token by token, with the first difference of
each."""

from __future__ import annotations

from dataclasses import dataclass

from harness.suite import Answers


@dataclass(frozen=True)
class Mismatch:
    """One answer that differs from its reference. position: index of the first differing token."""

    task: str
    position: int
    expected: tuple[int, ...]
    actual: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.task}: token {self.position} is {list(self.actual)}..., "
            f"the reference has {list(self.expected)}..."
        )


_SHOWN_TOKENS = 4


def compare(answers: Answers, references: list[tuple[int, ...]]) -> list[Mismatch]:
    """Return the mismatches of answers[i] with references[i], which must be as many. An answer of
    another length differs at the end of the shorter one."""
    found = []
    for (task, output), expected in zip(answers, references, strict=True):
        if output.output_ids == expected:
            continue
        position = next(
            (
                place
                for place, pair in enumerate(zip(output.output_ids, expected, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(output.output_ids), len(expected)),
        )
        until = position + _SHOWN_TOKENS
        found.append(
            Mismatch(
                task.name, position, expected[position:until], output.output_ids[position:until]
            )
        )
    return found
