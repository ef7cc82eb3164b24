"""Rules of language that a program can check: docs/contributing/style.md says why."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

LONGEST_SENTENCE = 40
LONGEST_SUBJECT = 72
# A docstring begins with a verb or a noun phrase, so that its first line says what the thing is.
VAGUE_OPENINGS = ("Of", "It", "They", "What", "Whether", "That", "As")
_PERSONS = re.compile(r"\b(who|whom|whoever|nobody|everybody)\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+")
# Abbreviations whose point ends no sentence.
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf)\.", re.IGNORECASE)
_NOT_PROSE = re.compile(r"\s*(\||#|!\[|<!--|---|```)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_ITEM = re.compile(r"\s*([-*+]|\d+\.)\s+")


@dataclass(frozen=True, slots=True)
class Finding:
    """One place that breaks a rule. line: counted from 1; 0 for a commit."""

    place: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        where = f"{self.place}:{self.line}" if self.line else self.place
        return f"{where}: {self.rule}: {self.text}"


def check_page(place: str, text: str) -> list[Finding]:
    """Return what breaks the rules in Markdown: long sentences, and persons for things."""
    found = []
    for line, paragraph in paragraphs(text):
        for sentence in sentences(paragraph):
            if (count := count_words(sentence)) > LONGEST_SENTENCE:
                found.append(Finding(place, line, f"{count} words in a sentence", _short(sentence)))
        found += _persons(place, line, paragraph)
    return found


def link_targets(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and target of each link and image to a file, without its anchor."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        if not is_code and not line.startswith("    "):
            for target in _LINK.findall(line):
                if not target.startswith(("#", "http://", "https://", "mailto:")):
                    yield number, target.split("#")[0]


def check_module(place: str, source: str) -> list[Finding]:
    """Return what breaks the rules in the docstrings and comments of a Python module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            line = node.body[0].lineno
            if (opening := text.split(maxsplit=1)[0]) in VAGUE_OPENINGS:
                found.append(Finding(place, line, f"a docstring begins {opening!r}", _short(text)))
            found += _persons(place, line, text)
    for line, text in enumerate(source.splitlines(), 1):
        if text.lstrip().startswith("# "):
            found += _persons(place, line, text.strip())
    return found


def check_subject(commit: str, subject: str) -> list[Finding]:
    """Return a finding where the first line of a commit message is too long."""
    if len(subject) <= LONGEST_SUBJECT:
        return []
    return [Finding(commit, 0, f"{len(subject)} characters in a subject", subject)]


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs and list items of Markdown, each with its first line. Code, tables,
    headings and comments are left out."""
    lines: list[str] = []
    first, is_code = 1, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        is_prose = bool(line.strip()) and not is_code and not _NOT_PROSE.match(line)
        is_prose = is_prose and (
            bool(lines) or not line.startswith("    ") or bool(_ITEM.match(line))
        )
        if lines and (not is_prose or _ITEM.match(line)):
            yield first, " ".join(lines)
            lines = []
        if is_prose:
            first = first if lines else number
            item = _ITEM.match(line)
            lines.append(line[item.end() if item else 0 :].strip())


def sentences(paragraph: str) -> list[str]:
    """Split prose where a sentence ends."""
    whole = _ABBREVIATION.sub(lambda found: found[1].replace(".", ""), paragraph)
    return [part for part in _SENTENCE_END.split(whole) if part]


def count_words(sentence: str) -> int:
    """Count words; a piece of code is one."""
    plain = re.sub(r"`[^`]*`", "code", sentence)
    plain = re.sub(r"\]\([^)]*\)", "]", plain)
    return sum(1 for word in plain.split() if any(map(str.isalnum, word)))


def _persons(place: str, line: int, text: str) -> list[Finding]:
    plain = re.sub(r"`[^`]*`", "", text)
    return [
        Finding(place, line, f"{word[0]!r} is for people", _short(plain[word.start() :]))
        for word in _PERSONS.finditer(plain)
    ]


def _short(text: str) -> str:
    return " ".join(text.split())[:80]
