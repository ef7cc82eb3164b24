"""Hooks into SGLang, one module per symbol. Importing this package patches nothing.

Each module says in its docstring which symbol it hooks, why, for which SGLang versions, and when
it can go; it defines TARGET, KIND (SGLang's hook type), SCOPE and `hook`. Scopes: `flags` (always),
`cpu` (whenever the reference platform runs), `kvspec` (a server started with --kvspec),
`front_kvspec` (the process of such a server that takes requests, which loads its HTTP modules), and
`cpu_kvspec` and `cuda_kvspec` (such a server on the reference platform, or on a GPU).
"""
