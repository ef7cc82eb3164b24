"""`--kvspec-stream paced`: a round's tokens reach a stream one by one.

The scheduler sends each token in a message of its own, at once, so that the detokenizer makes the
text of each. The HTTP process hands the tokens on over the time of the next round
(runtime/stream_pacer).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from sglang_kvspec.adapters import round_times
from sglang_kvspec.adapters.compat.messages import (
    BatchStrOutput,
    BatchTokenIDOutput,
    unwrap_from_pickle,
    wrap_as_pickle,
)
from sglang_kvspec.runtime.stream_pacer import StreamPacer

logger = logging.getLogger(__name__)

# Enough for the tokens of any round.
_FOLLOWING_BITS = 10
# Attribute of SGLang's TokenizerManager that holds its PacedOutputs.
_PACED = "_kvspec_paced"


def stream_by_token(stream: Callable[[list[Any]], None], reqs: list[Any], interval: int) -> None:
    """Call `stream`, SGLang's stream_output, once for every token of the longest run in `reqs`.

    A stream that continues shows one token more in each call. All other requests take part in the
    first call only. interval: tokens between two chunks of a stream, unless the request sets it.
    """
    runs = {id(req): _tokens_to_split(req, interval) for req in reqs}
    most = max(runs.values(), default=0)
    if most <= 1:
        stream(reqs)
        return
    for shown in range(1, most + 1):
        taking_part = [req for req in reqs if shown <= max(runs[id(req)], 1)]
        split = [req for req in taking_part if runs[id(req)] > 1]
        for req in split:
            # SGLang shows an answer up to here, and carries the counter to the HTTP process.
            req.finished_len = req.send_token_offset + 1
            following = runs[id(req)] - shown
            req.spec_num_block_accept_tokens = _packed(following, round_times.of(req))
        try:
            stream(taking_part)
        finally:
            for req in split:
                req.finished_len = None
                req.spec_num_block_accept_tokens = 0


def _packed(following: int, expected_s: float) -> int:
    """Return one counter of the tokens that follow in a round and the seconds to the next round."""
    return round(expected_s * 1000) << _FOLLOWING_BITS | following


def _unpacked(counter: int) -> tuple[int, float]:
    """Return what _packed() was given, the time in whole milliseconds."""
    return counter & (1 << _FOLLOWING_BITS) - 1, (counter >> _FOLLOWING_BITS) / 1000


def _tokens_to_split(req: Any, interval: int) -> int:
    """Return the number of a stream's new tokens; 0 for a request that shows them all at once."""
    if not req.stream or req.finished() or req.finished_len is not None:
        return 0
    if (req.sampling_params.stream_interval or interval) > 1:
        return 0
    return len(req.output_ids) - req.send_token_offset


class PacedOutputs:
    """Detokenized output on its way to `handle`, SGLang's _handle_batch_output, row by row."""

    def __init__(self, manager: Any, handle: Callable[[Any], Awaitable[None]]) -> None:
        self._manager = manager
        self._handle = handle
        self._pacer: StreamPacer[tuple[_Rows, int]] = StreamPacer()
        self._is_delivering = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def of(cls, manager: Any, handle: Callable[[Any], Awaitable[None]]) -> PacedOutputs:
        """Return the PacedOutputs of this TokenizerManager, made at the first call."""
        if not hasattr(manager, _PACED):
            setattr(manager, _PACED, cls(manager, handle))
        return getattr(manager, _PACED)  # type: ignore[no-any-return]

    async def receive(self, output: Any) -> None:
        """Hand on the rows of this message that are due, and hold the others."""
        if not isinstance(output, BatchStrOutput | BatchTokenIDOutput):
            await self._handle(output)
            return
        now = asyncio.get_running_loop().time()
        rows = range(len(output.rids))
        streams = [i for i in rows if self._is_stream(output.rids[i])]
        for i in set(rows).difference(streams):
            # The client of a stream may have left before its last message comes.
            self._pacer.drop(output.rids[i])
        if not streams:
            await self._handle(output)
            return
        parts = _Rows(output)
        older: list[tuple[_Rows, int]] = []
        ready = [i for i in rows if i not in streams]
        counters = output.spec_num_block_accept_tokens or [0] * len(rows)
        for i in streams:
            following, expected_s = _unpacked(counters[i])
            for item in self._pacer.receive(
                output.rids[i],
                (parts, i),
                following=following,
                expected_s=expected_s,
                is_last=output.finished_reasons[i] is not None,
                now=now,
            ):
                if item[0] is parts:
                    ready.append(i)
                else:
                    older.append(item)
        async with self._is_delivering:
            await self._deliver(older)
            if len(ready) == len(rows):
                await self._handle(output)
            elif ready:
                await self._handle(parts.select(ready))
        self._wake_up()

    def _is_stream(self, rid: str) -> bool:
        state = self._manager.rid_to_state.get(rid)
        return state is not None and bool(getattr(state.obj, "stream", False))

    async def _deliver(self, items: Sequence[tuple[_Rows, int]]) -> None:
        for parts, row in items:
            rid = parts.output.rids[row]
            if rid in self._manager.rid_to_state:
                await self._handle(parts.select([row]))
            else:
                self._pacer.drop(rid)

    def _wake_up(self) -> None:
        """Set the timer for the next item that is held."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._pacer.next_due()
        if due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._begin_delivery)

    def _begin_delivery(self) -> None:
        task = asyncio.get_running_loop().create_task(self._deliver_due())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver_due(self) -> None:
        try:
            async with self._is_delivering:
                await self._deliver(self._pacer.take_due(asyncio.get_running_loop().time()))
        except Exception:
            # Logged here: SGLang's own loop, which handles other messages, cannot see this task.
            logger.exception("KVSpec: cannot deliver a token to a stream")
        finally:
            self._wake_up()


class _Rows:
    """One batch message whose rows can be handed on separately. Pickled fields are read once."""

    def __init__(self, output: Any) -> None:
        self.output = output
        self._time_stats: list[Any] | None = None
        self._info: dict[str, list[Any]] | None = None
        self._is_read = False

    def select(self, rows: Sequence[int]) -> Any:
        """Return a message of these rows alone."""
        output, num_rows = self.output, len(self.output.rids)
        if not self._is_read:
            self._time_stats = unwrap_from_pickle(output.time_stats)
            self._info = unwrap_from_pickle(output.customized_info)
            self._is_read = True
        changes: dict[str, Any] = {}
        for name in output.__struct_fields__:
            values = getattr(output, name)
            if isinstance(values, list) and len(values) == num_rows:
                changes[name] = [values[i] for i in rows]
        if self._time_stats is not None:
            changes["time_stats"] = wrap_as_pickle([self._time_stats[i] for i in rows])
        if self._info is not None:
            info = {key: [values[i] for i in rows] for key, values in self._info.items()}
            changes["customized_info"] = wrap_as_pickle(info)
        return msgspec.structs.replace(output, **changes)
