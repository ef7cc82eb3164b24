"""Recording of the calls of steady rounds, inside the scheduler process of a real server.

A server that has this folder on PYTHONPATH loads it as an SGLang plug-in. KVSPEC_ROUND_TRACE holds
the settings as JSON (see Settings). Without the variable, nothing is recorded. The worker and the
model are found through SGLang's Scheduler, so class names of the traced tree do not matter.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_LIBRARY = -1


@dataclass(frozen=True)
class Settings:
    """Settings of a trace. tree: checkout whose code is traced. out: file of the result.

    A round counts if it decodes `requests` requests. The first `warm_up` of these rounds are not
    recorded, the next `rounds` are.
    """

    tree: str
    out: str
    requests: int
    warm_up: int
    rounds: int


class CallRecorder:
    """Recorder of calls of functions whose files lie below `roots`, from start() to stop().

    calls: [caller, callee, through_library, in_model] of every such call, in order. Functions are
    numbered as in `functions`: [file, qualified name, first line]. The caller is the innermost
    function of `roots` on the stack, -1 for none. through_library is 1 if frames of other files lie
    between the two. in_model is 1 below a function that model_forward() has wrapped.
    """

    def __init__(self, roots: Sequence[Path], base: Path) -> None:
        self._roots = tuple(f"{root}{os.sep}" for root in roots)
        self._base = base
        self._numbers: dict[CodeType, int] = {}
        self.functions: list[tuple[str, str, int]] = []
        self.calls: list[tuple[int, int, int, int]] = []
        self.model_forwards = 0
        self._model_depth = 0
        # For every frame since start(): its function or _LIBRARY, and the innermost function of
        # `roots`.
        self._stack: list[tuple[int, int]] = []

    def start(self) -> None:
        self.calls, self.model_forwards = [], 0
        self._stack = []
        sys.setprofile(self._on_event)

    def stop(self) -> None:
        sys.setprofile(None)

    def model_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `forward`, so that calls below it are marked as inside the model."""

        @functools.wraps(forward)
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._model_depth += 1
            self.model_forwards += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._model_depth -= 1

        return marked

    def _on_event(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            number = self._number(frame.f_code)
            outer, caller = self._stack[-1] if self._stack else (_LIBRARY, _LIBRARY)
            if number == _LIBRARY:
                self._stack.append((_LIBRARY, caller))
                return
            self.calls.append((caller, number, int(outer != caller), int(self._model_depth > 0)))
            self._stack.append((number, number))
        elif event == "return" and self._stack:
            self._stack.pop()

    def _number(self, code: CodeType) -> int:
        number = self._numbers.get(code)
        if number is None:
            number = _LIBRARY
            if code.co_filename.startswith(self._roots):
                number = len(self.functions)
                file = str(Path(code.co_filename).relative_to(self._base))
                self.functions.append((file, code.co_qualname, code.co_firstlineno))
            self._numbers[code] = number
        return number


class RoundTrace:
    """Recorder of whole rounds of one worker, which writes them once it has enough."""

    def __init__(self, settings: Settings, recorder: CallRecorder) -> None:
        self._settings = settings
        self._recorder = recorder
        self._seen = 0
        self._rounds: list[dict[str, Any]] = []

    def traced(self, forward_batch_generation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward_batch_generation)
        def either(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_wanted(batch):
                return forward_batch_generation(batch, *args, **kwargs)
            self._recorder.start()
            try:
                result = forward_batch_generation(batch, *args, **kwargs)
            finally:
                self._recorder.stop()
            self._note()
            return result

        return either

    def _is_wanted(self, batch: Any) -> bool:
        if not batch.forward_mode.is_decode() or len(batch.reqs) != self._settings.requests:
            return False
        self._seen += 1
        return self._seen > self._settings.warm_up and len(self._rounds) < self._settings.rounds

    def _note(self) -> None:
        recorder = self._recorder
        self._rounds.append({"calls": recorder.calls, "model_forwards": recorder.model_forwards})
        if len(self._rounds) == self._settings.rounds:
            out = Path(self._settings.out)
            unfinished = out.with_suffix(".unfinished")
            result = {"functions": recorder.functions, "rounds": self._rounds}
            unfinished.write_text(json.dumps(result), encoding="utf-8")
            unfinished.rename(out)


def register() -> None:
    """Trace the worker of this process's scheduler if KVSPEC_ROUND_TRACE is set."""
    if "KVSPEC_ROUND_TRACE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.scheduler.Scheduler.init_model_worker"
    HookRegistry.register(target, _trace_worker, HookType.AFTER)


def _trace_worker(result: None, scheduler: Any) -> None:
    import kvspec_kernels
    import kvspec_patches
    import sglang_kvspec

    settings = Settings(**json.loads(os.environ["KVSPEC_ROUND_TRACE"]))
    tree = Path(settings.tree)
    packages = (sglang_kvspec, kvspec_kernels, kvspec_patches)
    roots = [Path(package.__path__[0]) for package in packages]
    for root in roots:
        assert root.is_relative_to(tree), f"{root} is not in the traced tree {tree}"
    recorder = CallRecorder(roots, tree)
    worker, model = scheduler.model_worker, scheduler.tp_worker.model_runner.model
    model.forward = recorder.model_forward(model.forward)
    trace = RoundTrace(settings, recorder)
    worker.forward_batch_generation = trace.traced(worker.forward_batch_generation)
