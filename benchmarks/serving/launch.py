"""Servers as every benchmark of serving starts them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvspec_testkit.servers.server_process import ServerProcess
from serving.environment import server_environment
from serving.live_server import LiveServer
from serving.points import Model
from serving.prompts import folder_with_tokenizer
from serving.systems import System, server_arguments

# File of the acceptance curve in a run's scratch folder.
CURVE = "curve.json"


def acceptance_of(model: Model, args: argparse.Namespace) -> str:
    """Return the kind of acceptance on a server that drafts: "replayed" or "real"."""
    return "replayed" if model.dummy or args.replay else "real"


def live_server(
    model: Model,
    system: System,
    args: argparse.Namespace,
    scratch: Path,
    *,
    on_gpu: bool,
    max_running: int,
    deadline: float,
    facts: Mapping[str, Any],
) -> LiveServer:
    """Return a server that has not started. args: options of add_server_options(). scratch: folder
    with CURVE. deadline, facts: as for LiveServer; this function adds the facts that it knows."""
    folder = folder_with_tokenizer(model, scratch)
    acceptance = "" if system.target is None else acceptance_of(model, args)
    arguments = server_arguments(
        model,
        system,
        on_gpu=on_gpu,
        codec=args.codec,
        max_running=max_running,
        folder=str(folder),
        extra=shlex.split(args.server_args),
        extra_kvspec=shlex.split(args.kvspec_args),
    )
    process = ServerProcess(
        arguments,
        log_path=args.logs / f"{model.name}-{system.name}.log",
        environment=server_environment(
            scratch, scratch / CURVE if acceptance == "replayed" else None
        ),
    )
    known = {
        "system": system.name,
        "acceptance": acceptance,
        "server_arguments": [text for text in arguments if "--model-path" not in text],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return LiveServer(process, folder, scratch, deadline, {**known, **facts})
