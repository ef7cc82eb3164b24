"""Tables of the --kvspec flags, drawn from their declarations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from sglang_kvspec.core.flag import Flag, Table
from sglang_kvspec.core.flags import FLAGS, SWITCH

# Flags of the README's table, which a new user should know.
MAIN = (
    "--kvspec",
    "--kvspec-target",
    "--kvspec-host-gb",
    "--kvspec-draft-len",
    "--kvspec-stream",
    "--kvspec-prefix-host-gb",
    "--kvspec-prefix-dir",
    "--kvspec-transfer",
)
HEADER = "| flag | default | allowed | meaning |\n|---|---|---|---|"


def flag_tables() -> dict[str, str]:
    """Return each table by its name."""
    flags = (SWITCH, *FLAGS)
    by_table = {
        f"flags_{table}": _table_of([flag for flag in flags if flag.table == table])
        for table in get_args(Table)
    }
    return by_table | {"flags_main": _short_table([flag for flag in flags if flag.name in MAIN])}


def _short_table(flags: Sequence[Flag]) -> str:
    rows = [f"| `{flag.name}` | {flag.default_text()} | {flag.help} |" for flag in flags]
    return "\n".join(["| flag | default | meaning |\n|---|---|---|", *rows])


def _table_of(flags: Sequence[Flag]) -> str:
    rows = [_row(flag) for flag in flags]
    return "\n".join([HEADER, *rows])


def _row(flag: Flag) -> str:
    needs = [need.note for need in (*flag.needs, *flag.server_needs) if need.note]
    meaning = "; ".join(part for part in (flag.help, flag.note, *needs) if part)
    return f"| `{flag.name}` | {flag.default_text()} | {flag.allowed()} | {meaning} |"
