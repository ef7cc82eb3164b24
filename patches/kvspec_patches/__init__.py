"""Hooks into SGLang, one module per symbol. Importing this package patches nothing.

Each module says in its docstring which symbol it hooks and why, and defines `hook`. The table in
hooks.py says the rest: how and in which processes each is hooked, for which releases of SGLang, and
when the hook can go.
"""
