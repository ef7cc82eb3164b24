"""Reference answers on disk, so that several runs on one machine compute each of them only once."""

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
    """Answers of one reference server, one file each. Without a folder nothing is stored.

    Concurrent runs share the work: each run computes tasks that no other run is computing. The
    folder is for one commit and one machine, and does not record which.
    """

    def __init__(self, folder: Path | None, server: str) -> None:
        self._folder = folder
        self._server = server

    def answer(
        self, client: Callable[[], GenerateClient], tasks: Sequence[Task], on_done: OnDone
    ) -> Answers:
        """Return the answer to every task, computed alone on the server or read from the folder, in
        the order of `tasks`.

        client() starts the server if needed, so it is called only if an answer is missing.
        """
        outputs: dict[Task, Output] = {}
        # First the tasks that no other run is computing, then those that other runs have finished
        # or abandoned meanwhile.
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
        """Return the answer of one task. waits: wait for another run that computes the task;
        without it return None in that case."""
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
    """Yield whether this process holds the claim. The system drops the claims of a process that
    ended. waits: wait until the claim is held."""
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
