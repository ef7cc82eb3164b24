"""Reference answers on disk, so that several runs on one machine compute each of them once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from harness.client import GenerateClient, Output
from harness.suite import Answers, OnDone, Task


class ReferenceCache:
    """Answers of one reference server, one file each; without a folder nothing is kept.

    Concurrent runs share the work: each takes tasks no other is at. The folder is for one commit
    and one machine: nothing in it says what made it.
    """

    def __init__(self, folder: Path | None, server: str) -> None:
        self._folder = folder
        self._server = server

    def answer(
        self, client: Callable[[], GenerateClient], tasks: Sequence[Task], on_done: OnDone
    ) -> Answers:
        """Every task alone on the server, or as a run kept it; in the order of `tasks`.

        client() starts the server where need be, so it is called only if an answer is missing.
        """
        outputs: dict[Task, Output] = {}
        # First what no other run is at, then what others have finished, or left, meanwhile.
        for waits in (False, True):
            for task in tasks:
                if task in outputs:
                    continue
                output = self._known_or_computed(client, task, waits=waits)
                if output is not None:
                    outputs[task] = output
                    on_done()
        return [(task, outputs[task]) for task in tasks]

    def _known_or_computed(
        self, client: Callable[[], GenerateClient], task: Task, *, waits: bool
    ) -> Output | None:
        """Answer of one task. waits: for another run that computes it; otherwise None then."""
        if self._folder is None:
            return client().generate(task.input_ids, task.max_new_tokens)
        key = json.dumps([self._server, task.input_ids, task.max_new_tokens])
        path = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
        if path.exists():
            return _load(path)
        with _claimed(path.with_suffix(".claim"), waits=waits) as is_mine:
            if not is_mine:
                return None
            if not path.exists():
                _keep(path, client().generate(task.input_ids, task.max_new_tokens))
            return _load(path)


@contextmanager
def _claimed(path: Path, *, waits: bool) -> Iterator[bool]:
    """Yield whether this process holds the claim; the system drops those of a process that ended.
    waits: until it does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _load(path: Path) -> Output:
    kept = json.loads(path.read_text())
    return Output(tuple(kept["output_ids"]), kept["meta"])


def _keep(path: Path, output: Output) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(output)))
    unfinished.rename(path)
