"""Demo of a code model: a program over one file, and a stream that continues another file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import sglang as sgl
from demo_requests import Stage, read_source, run_stream, run_timed
from sglang.lang.interpreter import ProgramState

PROMPT_TOKENS = 4000
CONTINUATION_TOKENS = 96
BRANCH_TOKENS = 64

# The program over one long file branches into three methods of its class. The stream continues
# another file.
PROGRAM_SOURCE = ("networkx", "classes/graph.py")
STREAM_SOURCE = ("aiohttp", "multipart.py")
BRANCHES = ("copy", "reverse", "is_empty")


def run_code(base_url: str, model_folder: Path) -> Iterator[Stage]:
    """Yield each stage of the demo when it ends. Raises SGLang's error if an answer causes one."""
    program = read_source(model_folder, *PROGRAM_SOURCE, PROMPT_TOKENS)
    stream = read_source(model_folder, *STREAM_SOURCE, PROMPT_TOKENS)
    yield run_program(base_url, program)
    yield run_stream(base_url, str(model_folder), stream)


@sgl.function
def extend_class(s: ProgramState, source: str) -> dict[str, str]:
    """Continue a class, then write three methods of it side by side. Returns text by name."""
    s += source
    s += sgl.gen("continuation", max_tokens=CONTINUATION_TOKENS, ignore_eos=True)
    outputs = {"continuation": s["continuation"]}
    branches = s.fork(len(BRANCHES))
    for branch, method in zip(branches, BRANCHES, strict=True):
        branch += f"\n\n    def {method}(self"
        branch += sgl.gen("body", max_tokens=BRANCH_TOKENS, ignore_eos=True)
    for branch, method in zip(branches, BRANCHES, strict=True):
        outputs[f"def {method}"] = branch["body"]
    branches.join()
    return outputs


def run_program(base_url: str, source: str) -> Stage:
    """Run extend_class greedily on a server. Raises SGLang's error if an answer causes one."""
    state, elapsed_s = run_timed(base_url, extend_class, source=source)
    num_tokens = CONTINUATION_TOKENS + len(BRANCHES) * BRANCH_TOKENS
    return Stage("program with fork", state.ret_value, num_tokens, elapsed_s)
