"""The language rules find what they are meant to find, and nothing else."""

from __future__ import annotations

import pytest

from kvspec_testkit.words import (
    check_module,
    check_page,
    check_subject,
    count_words,
    link_targets,
    paragraphs,
)

LONG = " ".join(["word"] * 41) + "."


def rules(findings):
    return [finding.rule for finding in findings]


def test_a_long_sentence_is_found_where_its_paragraph_begins():
    (finding,) = check_page("page.md", f"# Title\n\nShort. {LONG}\n")
    assert (finding.line, finding.rule) == (3, "41 words in a sentence")
    assert check_page("page.md", LONG.replace("word ", "", 1)) == []


@pytest.mark.parametrize(
    "text", [f"```\n{LONG}\n```", f"    {LONG}", f"| {LONG} |", f"# {LONG}", f"<!-- {LONG} -->"]
)
def test_what_is_no_prose_is_left_out(text):
    assert check_page("page.md", f"\n{text}\n") == []


def test_items_of_a_list_are_sentences_of_their_own():
    half = " ".join(["word"] * 30)
    text = f"- {half}\n- {half}\n  and more\n\n1. {half}"
    assert check_page("page.md", text) == []
    assert [line for line, _ in paragraphs(text)] == [1, 2, 5]


def test_a_number_that_ends_a_sentence_is_no_item():
    half = " ".join(["word"] * 30)
    assert check_page("page.md", f"{half} 349. {half} 2 * 3. {half}") == []


def test_code_and_links_count_as_the_words_that_are_read():
    assert count_words("see [the guide](../guides/one.md), or run `a b c` - now") == 7


def test_a_point_in_an_abbreviation_ends_no_sentence():
    half = " ".join(["word"] * 21)
    assert rules(check_page("page.md", f"{half}, e.g. {half}.")) == ["43 words in a sentence"]


@pytest.mark.parametrize("word", ["who", "Nobody", "whoever", "everybody"])
def test_words_for_people_are_found_in_pages_docstrings_and_comments(word):
    assert rules(check_page("page.md", f"A request {word} waits.")) == [f"{word!r} is for people"]
    module = f'"""Requests {word} wait."""\n# {word} waits\nx = "{word}"\n'
    assert rules(check_module("module.py", module)) == [f"{word!r} is for people"] * 2


@pytest.mark.parametrize("opening", ["Of", "It", "They", "What", "Whether"])
def test_a_docstring_begins_with_a_verb_or_a_noun(opening):
    module = f'class A:\n    def b(self):\n        """{opening} a page."""\n'
    (finding,) = check_module("module.py", module)
    assert (finding.line, finding.rule) == (3, f"a docstring begins {opening!r}")
    assert check_module("module.py", '"""Officers of a page."""') == []


def test_a_subject_has_72_characters_at_most():
    assert check_subject("abc", "x" * 72) == []
    assert rules(check_subject("abc", "x" * 73)) == ["73 characters in a subject"]


def test_links_to_files_are_found_and_others_are_not():
    text = "[a](one.md#part) and ![b](../two.png)\n\n[c](https://d.e) [f](#part)\n\n    [g](h.md)\n"
    assert list(link_targets(text)) == [(1, "one.md"), (1, "../two.png")]
