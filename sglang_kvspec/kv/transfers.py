"""Small tensors on their way to the device, which nobody waits for, and back.

A copy would go through the engine that brings residuals, and wait there for pages in front of it:
what a verification needs to know came as late as the residuals of the next one. So the CPU lays
values down in pinned memory, and a kernel of the stream that needs them reads them there. While
pages come that takes 0.2 ms or more (H200), however little it reads: what a round needs together is
sent together. Only FlashInfer's own plans, of the target `exact`, are still copied.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from sglang_kvspec.kv.copy_streams import Event

# Of pinned memory that values are laid down in. They stay until the device has read them, which it
# does once or twice while a round is given to it.
STAGE_BYTES = 4 << 20
# Larger ones are copied: what they wait for matters less then.
MOST_BYTES = STAGE_BYTES // 8
WORD_BYTES = 4
# Of what comes in one piece.
ALIGNMENT = 16


def to_device(device: torch.device, values: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU, for the device to read: on a GPU a contiguous copy, which is there for
    what the current stream is given from now on."""
    (there,) = sent_together(device, [values])
    return there


def sent_together(device: torch.device, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """to_device() of each, which take no longer than one where the link is busy."""
    if device.type != "cuda":
        return [each.to(device, non_blocking=True) for each in values]
    # In one piece of memory, where each begins at a multiple of what any dtype needs.
    sizes = [_num_words(each) for each in values]
    places = torch.empty(sum(sizes), dtype=torch.int32, device=device).split_with_sizes(sizes)
    _send(list(zip(places, values, strict=True)))
    return [
        place.view(torch.uint8)[: each.nbytes].view(each.dtype).view(each.shape)
        for place, each in zip(places, values, strict=True)
    ]


def fields_to_device(
    device: torch.device, source: object, names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """sent_together() of these fields, tensors."""
    there = sent_together(device, [getattr(source, name) for name in names])
    return dict(zip(names, there, strict=True))


def send_into(sends: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """target[...] = values for each (target, values) of one shape, in place; targets are contiguous
    and of whole words of 4 bytes, values become their dtype. On a GPU as sent_together() says."""
    sends = [(target, values.to(target.dtype)) for target, values in sends]
    for target, values in sends:
        assert target.shape == values.shape, (target.shape, values.shape)
    if sends and sends[0][0].device.type != "cuda":
        for target, values in sends:
            target.copy_(values)
        return
    _send(sends)


def received_together(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """These tensors of one device and dtype, on the CPU, which waits for the device once."""
    if not values:
        return []
    sizes = [each.numel() for each in values]
    here = torch.cat([each.flatten() for each in values]).cpu().split_with_sizes(sizes)
    return [part.view(each.shape) for part, each in zip(here, values, strict=True)]


def _send(sends: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """The bytes of values into the first ones of contiguous targets on a GPU, of whole words."""
    some: list[tuple[torch.Tensor, torch.Tensor]] = []
    num_bytes = 0
    for target, values in sends:
        if values.nbytes > MOST_BYTES:
            there = target.view(-1).view(torch.uint8)[: values.nbytes]
            there.copy_(_bytes_of(values).pin_memory(), non_blocking=True)
            continue
        if num_bytes + target.nbytes > STAGE_BYTES // 2:
            _stage(target.device).send(some)
            some, num_bytes = [], 0
        some.append((target, values))
        num_bytes += target.nbytes
    if some:
        _stage(some[0][0].device).send(some)


def _num_words(values: torch.Tensor) -> int:
    """Of a place for them, behind which another one may begin."""
    return -(-values.nbytes // ALIGNMENT) * (ALIGNMENT // WORD_BYTES)


class Stage:
    """Memory that the device reads, used round and round."""

    def __init__(
        self,
        words: torch.Tensor,
        read: Callable[[Sequence[tuple[torch.Tensor, torch.Tensor]]], Event],
    ) -> None:
        """words: int32 on the CPU. read: makes the device copy some of them, the second of each
        pair, into a tensor of as many bytes, the first, behind what its current stream was given;
        returns when it has."""
        self._words, self._read = words, read
        self._next = 0
        # What the device may still have to read: begin and end, and when it has. The oldest first.
        self._unread: deque[tuple[int, int, Event]] = deque()
        # Nobody but the scheduler's thread sends today; the CPU's part is short enough to be safe.
        self._lock = threading.Lock()

    def send(self, sends: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The bytes of values into the first ones of contiguous targets, of whole words; no more in
        all than the memory holds."""
        sends = [(target, values) for target, values in sends if values.nbytes]
        if not sends:
            return
        with self._lock:
            sizes = [target.nbytes // WORD_BYTES for target, _ in sends]
            begin, end = self._take(sum(sizes))
            parts = []
            for (target, values), words in zip(
                sends, self._words[begin:end].split_with_sizes(sizes), strict=True
            ):
                words.view(torch.uint8)[: values.nbytes].copy_(_bytes_of(values))
                parts.append((target, words))
            self._unread.append((begin, end, self._read(parts)))

    def _take(self, num_words: int) -> tuple[int, int]:
        """Words that the device does not read any more; the CPU waits until it has read them."""
        assert num_words <= len(self._words), "more than the memory holds"
        wraps = self._next + num_words > len(self._words)
        begin = 0 if wraps else self._next
        end = begin + num_words
        while self._unread:
            first, last, read = self._unread[0]
            is_passed_over = wraps and first >= self._next
            if not (is_passed_over or (first < end and begin < last) or read.query()):
                break
            read.synchronize()
            self._unread.popleft()
        self._next = end
        return begin, end


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    if values.numel() == 1:
        # Contiguous whatever its stride, which viewing it as bytes does not forgive.
        values = torch.tensor([values.item()], dtype=values.dtype)
    return values.contiguous().view(-1).view(torch.uint8)


_stages: dict[torch.device, Stage] = {}
_stages_lock = threading.Lock()


def _stage(device: torch.device) -> Stage:
    """One for a device: memory of another would be given back while the device reads it."""
    with _stages_lock:
        if device not in _stages:
            words = torch.empty(STAGE_BYTES // WORD_BYTES, dtype=torch.int32, pin_memory=True)
            _stages[device] = Stage(words, _read_by_kernel)
        return _stages[device]


def _read_by_kernel(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Event:
    # Late: it loads a kernel, which a CPU does without.
    from kvspec_kernels.ops.read_host import read_host

    read_host(parts)
    read = torch.cuda.Event()  # type: ignore[no-untyped-call]
    # The stream that read_host() takes.
    read.record(torch.cuda.current_stream(parts[0][0].device))
    return read
