"""The documentation of each flag agrees with its declaration."""

from __future__ import annotations

import flag_tables

from sglang_kvspec.core.flags import FLAGS, SWITCH


def test_each_flag_has_one_row():
    found = flag_tables.flag_tables()
    assert found.pop("flags_main").count("\n| `--") == len(flag_tables.MAIN)
    text = "\n".join(found.values())
    for flag in (SWITCH, *FLAGS):
        assert text.count(f"\n| `{flag.name}` | ") == 1


def test_a_row_tells_what_a_flag_needs():
    text = flag_tables.flag_tables()["flags_server"]
    (row,) = (line for line in text.splitlines() if line.startswith("| `--kvspec-prefix-gb`"))
    assert "| 16 | above 0 GiB |" in row
    assert row.endswith("; needs `--kvspec-prefix-dir` |")
