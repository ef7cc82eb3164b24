"""One CPU server of a chosen checkout, and requests that keep it in steady rounds."""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import requests

from kvspec_testkit.servers.server_process import CPU_ARGUMENTS, ServerProcess
from round_trace.counts import Round, read_rounds

PLUGIN = Path(__file__).resolve().parent / "plugin"
START_TIMEOUT_S = 480.0
REQUEST_TIMEOUT_S = 1200.0
PROMPT_LEN = 200


@dataclass(frozen=True, slots=True)
class Load:
    """Greedy requests that arrive together. Rounds of fewer requests are not traced, nor are the
    first `warm_up` rounds of all requests."""

    model: Path
    requests: int
    draft_len: int
    new_tokens: int
    warm_up: int
    rounds: int

    def server_arguments(self) -> tuple[str, ...]:
        """Return the arguments of the server. Draft lengths are fixed and residuals stay in the KV
        memory: both, and so the number of calls, would otherwise depend on measured times."""
        return (
            *CPU_ARGUMENTS,
            f"--model-path={self.model}",
            "--max-total-tokens=24576",
            "--grammar-backend=none",
            "--kvspec",
            "--kvspec-schedule=rounds",
            "--kvspec-codec=uniform4",
            "--kvspec-host-gb=0",
            f"--kvspec-draft-len={self.draft_len}",
        )


def trace_rounds(tree: Path, load: Load, folder: Path) -> list[Round]:
    """Serve `load` with the code of `tree`, and return the traced rounds. folder: folder for the
    log and the trace. Raises RuntimeError if the requests end before enough rounds are traced."""
    out = folder / "rounds.json"
    settings = {"tree": str(tree), "out": str(out), "requests": load.requests}
    settings |= {name: asdict(load)[name] for name in ("warm_up", "rounds")}
    roots = (PLUGIN, tree, tree / "kernels", tree / "patches")
    environment = {
        "KVSPEC_ROUND_TRACE": json.dumps(settings),
        "PYTHONPATH": os.pathsep.join(map(str, roots)),
        # The working directory must not come before the tree.
        "PYTHONSAFEPATH": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    log = folder / "server.log"
    with ServerProcess(load.server_arguments(), log_path=log, environment=environment) as server:
        server.wait_healthy(START_TIMEOUT_S)
        _send(server.base_url, load)
        if not out.exists():
            raise RuntimeError(
                f"{tree}: answers of {load.new_tokens} tokens ended before {load.warm_up} + "
                f"{load.rounds} rounds of {load.requests} requests: raise --new-tokens; the end of "
                f"the log:\n{server.log_tail()}"
            )
    return read_rounds(out)


def _send(base_url: str, load: Load) -> None:
    """Send all requests in one batch and wait for the answers."""
    dice = random.Random(0)
    vocabulary = json.loads((load.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prompts = [
        [dice.randrange(vocabulary // 8, vocabulary) for _ in range(PROMPT_LEN)]
        for _ in range(load.requests)
    ]
    params = {"temperature": 0, "max_new_tokens": load.new_tokens, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": params}
    reply = requests.post(f"{base_url}/generate", json=body, timeout=REQUEST_TIMEOUT_S)
    reply.raise_for_status()
