"""Requests of the demos: prompts of real code, streams through the OpenAI client, programs."""

from __future__ import annotations

import importlib.util
import json
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sglang as sgl
from openai import OpenAI
from sglang.lang.chat_template import get_chat_template
from sglang.lang.interpreter import ProgramState
from sglang.lang.ir import SglFunction
from tokenizers import Tokenizer

STREAM_TOKENS = 160
ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Stage:
    """One stage of a demo. outputs: text by name. elapsed_s: seconds of all outputs together."""

    name: str
    outputs: dict[str, str]
    num_tokens: int
    elapsed_s: float
    first_token_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole stage, or after the first token if that was timed."""
        if self.first_token_s is None:
            return self.num_tokens / self.elapsed_s
        # An answer of one token, or in one piece, has no rate: avoid a division by zero.
        return (self.num_tokens - 1) / max(self.elapsed_s - self.first_token_s, 1e-3)


def read_source(model_folder: Path, package: str, file: str, num_tokens: int) -> str:
    """Return the start of an installed source file: at least num_tokens tokens, up to the first
    line of a method, where a code model can continue."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"the package {package}, which SGLang installs, is missing"
    assert spec.origin is not None, f"the package {package} has no source file"
    text = (Path(spec.origin).parent / file).read_text(encoding="utf-8")
    encoding = Tokenizer.from_file(str(model_folder / "tokenizer.json")).encode(text)
    method = text.index("\n    def ", encoding.offsets[num_tokens][0])
    # Leave out the line's end: in training, the model saw it joined with the next indentation.
    return text[: text.index("\n", method + 1)]


def run_stream(base_url: str, model: str, source: str) -> Stage:
    """Stream a greedy completion through the OpenAI client."""
    create = partial(
        _client(base_url).completions.create,
        model=model,
        prompt=source,
        max_tokens=STREAM_TOKENS,
        extra_body={"ignore_eos": True},
    )
    return _stream("OpenAI stream", "stream", create, lambda choice: choice.text)


def run_chat(
    base_url: str, model: str, name: str, messages: list[dict[str, str]], num_tokens: int
) -> Stage:
    """Stream a greedy answer of at most num_tokens to a chat through the OpenAI client."""
    create = partial(
        _client(base_url).chat.completions.create,
        model=model,
        messages=messages,
        max_tokens=num_tokens,
    )
    return _stream(name, name, create, lambda choice: choice.delta.content)


def run_timed(
    base_url: str, program: SglFunction, *, chat_template: str | None = None, **arguments: str
) -> tuple[ProgramState, float]:
    """Run a program of SGLang's frontend greedily. Returns its state and its seconds. Raises
    SGLang's error if an answer causes one."""
    backend = sgl.RuntimeEndpoint(base_url)
    if chat_template is not None:
        backend.chat_template = get_chat_template(chat_template)
    sgl.set_default_backend(backend)
    started = time.monotonic()
    state = program.run(temperature=0, **arguments)
    elapsed_s = time.monotonic() - started
    if state.error() is not None:
        raise state.error()
    return state, elapsed_s


def _client(base_url: str) -> OpenAI:
    return OpenAI(base_url=f"{base_url}/v1", api_key="none")


def _stream(
    name: str, output: str, create: Callable[..., Any], text_of: Callable[[Any], str | None]
) -> Stage:
    started = time.monotonic()
    first_token_s = None
    pieces, num_tokens = [], 0
    stream = create(temperature=0, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        if chunk.choices and (text := text_of(chunk.choices[0])):
            if first_token_s is None:
                first_token_s = time.monotonic() - started
            pieces.append(text)
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
    elapsed_s = time.monotonic() - started
    return Stage(name, {output: "".join(pieces)}, num_tokens, elapsed_s, first_token_s)


@dataclass(frozen=True)
class Answer:
    """Answer of a server to ask(). sent_at: seconds since the epoch."""

    text: str
    meta_info: dict[str, Any]
    sent_at: float
    elapsed_s: float

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.meta_info["prompt_tokens"])


def ask(base_url: str, prompt: str, num_tokens: int) -> Answer:
    """Continue a prompt greedily. Raises urllib.error.HTTPError for any status but 200."""
    body = {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{base_url}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    sent_at = time.time()
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as reply:
        said = json.load(reply)
    return Answer(said["text"], said["meta_info"], sent_at, time.time() - sent_at)
