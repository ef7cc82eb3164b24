"""Demo of a chat model: a chat, a program over a long text, and a summary of that text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import sglang as sgl
from demo_requests import Stage, run_chat, run_timed
from sglang.lang.interpreter import ProgramState

# 2,300 tokens of English that come with the project.
LONG_TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
TURNS = (
    "Why do processors guess which way a branch goes? Answer in two sentences.",
    "What happens when the guess is wrong?",
)
SUMMARY = "Summarise this document in two sentences."
KIND = "What kind of document is this? Answer in one sentence."
# Questions, by the names of their answers in the tables.
QUESTIONS = {
    "use of the work": "What may a licensee do with the work?",
    "copies": "What must a copy contain?",
    "warranty": "Is there a warranty?",
}
TURN_TOKENS, SUMMARY_TOKENS, ANSWER_TOKENS = 48, 64, 32


def run_chats(base_url: str, model_folder: Path) -> Iterator[Stage]:
    """Yield each stage of the demo when it ends. Raises SGLang's error if an answer causes one."""
    model = str(model_folder)
    messages: list[dict[str, str]] = []
    for number, question in enumerate(TURNS, 1):
        messages.append({"role": "user", "content": question})
        stage = run_chat(base_url, model, f"chat, turn {number}", messages, TURN_TOKENS)
        messages.append({"role": "assistant", "content": stage.outputs[stage.name]})
        yield stage
    text = LONG_TEXT.read_text(encoding="utf-8")
    asked = [{"role": "user", "content": f"{text}\n\n{SUMMARY}"}]
    yield run_program(base_url, text)
    yield run_chat(base_url, model, "summary", asked, SUMMARY_TOKENS)


@sgl.function
def ask_about(s: ProgramState, text: str) -> None:
    """Ask what a text is, then three questions about it side by side."""
    s += sgl.user(f"{text}\n\n{KIND}")
    s += sgl.assistant(sgl.gen("kind", max_tokens=ANSWER_TOKENS))
    branches = s.fork(len(QUESTIONS))
    for branch, question in zip(branches, QUESTIONS.values(), strict=True):
        branch += sgl.user(question)
        branch += sgl.assistant(sgl.gen("answer", max_tokens=ANSWER_TOKENS))
    for number, branch in enumerate(branches):
        s.set_var(f"answer {number}", branch["answer"])
        s.set_var(f"tokens {number}", branch.get_meta_info("answer")["completion_tokens"])
    branches.join()


def run_program(base_url: str, text: str) -> Stage:
    """Run ask_about greedily on a server. Raises SGLang's error if an answer causes one."""
    state, elapsed_s = run_timed(base_url, ask_about, chat_template="chatml", text=text)
    outputs = {"kind of text": state["kind"]}
    outputs |= {name: state[f"answer {n}"] for n, name in enumerate(QUESTIONS)}
    num_tokens = state.get_meta_info("kind")["completion_tokens"]
    num_tokens += sum(state[f"tokens {n}"] for n in range(len(QUESTIONS)))
    return Stage("program with fork", outputs, num_tokens, elapsed_s)
