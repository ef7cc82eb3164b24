"""What the demo asks of a server: an SGLang program, and a stream through the OpenAI client."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path

import sglang as sgl
from openai import OpenAI
from sglang.lang.interpreter import ProgramState
from tokenizers import Tokenizer

PROMPT_TOKENS = 4000
CONTINUATION_TOKENS = 96
BRANCH_TOKENS = 64
STREAM_TOKENS = 160

# A program over one long file branches into three methods of its class; a stream continues another.
PROGRAM_SOURCE = ("networkx", "classes/graph.py")
STREAM_SOURCE = ("aiohttp", "multipart.py")
BRANCHES = ("copy", "reverse", "is_empty")


@dataclass(frozen=True)
class Stage:
    """One thing the demo did. outputs: text by name; elapsed_s covers all of them."""

    name: str
    outputs: dict[str, str]
    num_tokens: int
    elapsed_s: float
    first_token_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Of the whole stage, or of what followed the first token where that was timed."""
        if self.first_token_s is None:
            return self.num_tokens / self.elapsed_s
        return (self.num_tokens - 1) / (self.elapsed_s - self.first_token_s)


def read_source(model_folder: Path, package: str, file: str) -> str:
    """The start of an installed source file, at least PROMPT_TOKENS tokens, up to where a method
    opens: there a code model has something to say."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} comes with SGLang"
    assert spec.origin is not None, f"{package} is a regular package"
    text = (Path(spec.origin).parent / file).read_text(encoding="utf-8")
    encoding = Tokenizer.from_file(str(model_folder / "tokenizer.json")).encode(text)
    method = text.index("\n    def ", encoding.offsets[PROMPT_TOKENS][0])
    # Without the line's end, which the model saw joined to the indentation after it.
    return text[: text.index("\n", method + 1)]


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
    """Run extend_class greedily on a server. Raises what the server's answer made SGLang raise."""
    sgl.set_default_backend(sgl.RuntimeEndpoint(base_url))
    started = time.monotonic()
    state = extend_class.run(source=source, temperature=0)
    elapsed_s = time.monotonic() - started
    if state.error() is not None:
        raise state.error()
    num_tokens = CONTINUATION_TOKENS + len(BRANCHES) * BRANCH_TOKENS
    return Stage("program with fork", state.ret_value, num_tokens, elapsed_s)


def run_stream(base_url: str, model: str, source: str) -> Stage:
    """Stream a greedy completion through the OpenAI client."""
    client = OpenAI(base_url=f"{base_url}/v1", api_key="none")
    started = time.monotonic()
    first_token_s = None
    pieces, num_tokens = [], 0
    stream = client.completions.create(
        model=model,
        prompt=source,
        max_tokens=STREAM_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            if first_token_s is None:
                first_token_s = time.monotonic() - started
            pieces.append(chunk.choices[0].text)
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
    elapsed_s = time.monotonic() - started
    return Stage("OpenAI stream", {"stream": "".join(pieces)}, num_tokens, elapsed_s, first_token_s)
