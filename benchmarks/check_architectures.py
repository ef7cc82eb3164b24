"""Compare answers with --kvspec with plain SGLang's, for tiny models of several architectures.

    python benchmarks/check_architectures.py [NAME ...] [--out RESULT.json]

Each model has random weights in fp32. Both servers run on the CPU, side by side. Prompts are
answered one at a time, and with --kvspec also all at once. A model that a server refuses, or cannot
load, is recorded with the reason.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import torch
from acceptance.report import Figure, write_json
from rich.console import Console
from serving.live_server import kvspec_of

from kvspec_testkit.servers.server_process import CPU_ARGUMENTS, ServerProcess, ServerStartError

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "models" / "demo-5m"
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    # Larger than usual, so that attention changes which token is the most likely.
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
ALL_HEADS = {"num_key_value_heads": 4}
# Options of transformers' configurations besides SIZES, by a name and a model_type.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("llama", ALL_HEADS),
    "Llama 3": (
        "llama",
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        },
    ),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Qwen2": ("qwen2", {"use_sliding_window": False}),
    "Qwen3": ("qwen3", {"head_dim": 32, "use_sliding_window": False}),
    "Phi": ("phi", ALL_HEADS),
    "Phi-3": ("phi3", {"sliding_window": None}),
    "Gemma": ("gemma", {"head_dim": 64}),
    "GLM-4": ("glm4", {"head_dim": 32}),
    "OLMo 2": ("olmo2", {}),
    "Granite": ("granite", {}),
    "StableLM": ("stablelm", {}),
    "StarCoder2": ("starcoder2", {"sliding_window": None}),
    "Mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "Qwen2-MoE": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 64}),
    "Qwen3-MoE": ("qwen3_moe", EXPERTS | {"head_dim": 32}),
}
PROMPT_LENS = (130, 700, 260)
NEW_TOKENS = 48
KVSPEC = ("--kvspec", "--kvspec-draft-len=8")
START_TIMEOUT_S, ANSWER_TIMEOUT_S = 300.0, 300.0
console = Console(width=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"out of: {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/architectures.json")
    parser.add_argument("--logs", type=Path, default=ROOT / ".kvspec" / "architectures")
    args = parser.parse_args()
    if unknown := set(args.names) - set(MODELS):
        parser.error(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    found = {}
    for name in args.names or MODELS:
        found[name] = check(name, args.logs)
        console.print(f"{name}: {found[name]['result']}")
    served = [each for each in found.values() if "mismatches" in each]
    mismatches = sum(each["mismatches"] for each in served)
    answers = sum(each["answers"] for each in served)
    figures = [
        Figure("compat.architectures", sum(not each["mismatches"] for each in served), "models"),
        Figure("compat.architectures.mismatches", mismatches, f"of {answers} answers", None, 0),
    ]
    settings = {"prompt_lens": PROMPT_LENS, "new_tokens": NEW_TOKENS, "models": found}
    write_json(args.out, "check_architectures", torch.device("cpu"), settings, figures)
    return 1 if mismatches else 0


def check(name: str, logs: Path) -> dict[str, Any]:
    """Return how a model's answers compare, or why there are none."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        architecture = make_model(name, folder)
        common = (*CPU_ARGUMENTS, f"--model-path={folder}", "--max-total-tokens=8192")
        plain, kvspec = (
            ServerProcess((*common, *more), log_path=logs / f"{name} {kind}.log")
            for kind, more in (("plain", ()), ("kvspec", KVSPEC))
        )
        with plain, kvspec:
            for kind, server in (("plain SGLang", plain), ("with --kvspec", kvspec)):
                try:
                    server.wait_healthy(START_TIMEOUT_S)
                except ServerStartError as error:
                    reason = next(
                        (line for line in reversed(str(error).splitlines()) if "Error" in line), ""
                    )
                    result = f"{kind}: did not start: {reason.strip()[:300]}"
                    return {"architecture": architecture, "result": result}
            return {"architecture": architecture, **compare(plain, kvspec)}


def compare(plain: ServerProcess, kvspec: ServerProcess) -> dict[str, Any]:
    chance = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 4096, (n,), generator=chance).tolist() for n in PROMPT_LENS]
    expected = [ask(plain, prompt) for prompt in prompts]
    answers = [ask(kvspec, prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers += pool.map(lambda prompt: ask(kvspec, prompt), prompts)
    differ = sum(a != b for a, b in zip(answers, expected * 2, strict=True))
    info = requests.get(f"{kvspec.base_url}/server_info", timeout=ANSWER_TIMEOUT_S).json()
    counters = kvspec_of(info)["counters"]
    return {
        "answers": len(answers),
        "mismatches": differ,
        "drafted": counters["drafted"],
        "accepted": counters["accepted"],
        "result": f"{differ} of {len(answers)} answers differ, {counters['accepted']} of "
        f"{counters['drafted']} drafts accepted",
    }


def ask(server: ServerProcess, prompt: Sequence[int]) -> list[int]:
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": params}
    reply = requests.post(f"{server.base_url}/generate", json=body, timeout=ANSWER_TIMEOUT_S)
    reply.raise_for_status()
    return list(reply.json()["output_ids"])


def make_model(name: str, folder: Path) -> str:
    """Write a model with random weights. Return its class."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, more = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | more)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, folder / file)
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    return str(architecture)


if __name__ == "__main__":
    raise SystemExit(main())
