"""Tables of the README that list the --kvspec flags, drawn from their declarations."""

from __future__ import annotations

from typing import get_args

from sglang_kvspec.core.flag import Flag, Table
from sglang_kvspec.core.flags import FLAGS, SWITCH

HEADER = "| flag | default | allowed | meaning |\n|---|---|---|---|"


def flag_tables() -> dict[str, str]:
    """Return each table by the mark in the README between whose ends it stands."""
    return {f"flags_{table}": _table_of(table) for table in get_args(Table)}


def _table_of(table: Table) -> str:
    rows = [_row(flag) for flag in (SWITCH, *FLAGS) if flag.table == table]
    return "\n".join([HEADER, *rows])


def _row(flag: Flag) -> str:
    needs = [need.note for need in (*flag.needs, *flag.server_needs) if need.note]
    meaning = "; ".join(part for part in (flag.help, flag.note, *needs) if part)
    return f"| `{flag.name}` | {flag.default_text()} | {flag.allowed()} | {meaning} |"
