"""The README says of each flag what its declaration says."""

from __future__ import annotations

import readme_tables

from sglang_kvspec.core.flags import FLAGS, SWITCH


def test_the_readme_is_drawn_from_the_declarations():
    text = readme_tables.README.read_text(encoding="utf-8")
    assert text == readme_tables.with_flag_tables(text), "run benchmarks/readme_tables.py"


def test_each_flag_has_one_row():
    text = readme_tables.README.read_text(encoding="utf-8")
    for flag in (SWITCH, *FLAGS):
        assert text.count(f"\n| `{flag.name}` | ") == 1


def test_a_row_tells_what_a_flag_needs():
    text = readme_tables.README.read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith("| `--kvspec-prefix-gb`"))
    assert "| 16 | above 0 GiB |" in row
    assert row.endswith("; needs `--kvspec-prefix-dir` |")
