"""Small tensors sent to the device past the copy engine, and received from it.

A copy would queue in the engine that fetches residuals, behind whole pages: a verification would
wait for residuals of the next one. So the CPU writes values to pinned memory, and a kernel of the
stream that needs them reads them there. While pages are fetched, such a read takes 0.2 ms or more
(H200), however small. So send together what a round needs together. Only values above MOST_BYTES,
and FlashInfer's own plans of the target `exact`, are copied.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from sglang_kvspec.kv.copy_streams import Event

# Pinned memory that values are written to. They stay until the device has read them, which it does
# once or twice while a round is enqueued.
STAGE_BYTES = 4 << 20
# Larger values are copied: they take long anyway, so that waiting for pages matters less.
MOST_BYTES = STAGE_BYTES // 8
WORD_BYTES = 4
# Alignment in bytes of each of the values that are sent together.
ALIGNMENT = 16


def to_device(device: torch.device, values: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor on the device. On a GPU: a contiguous copy, ready for work that the
    current stream is given after this call."""
    (there,) = sent_together(device, [values])
    return there


def sent_together(device: torch.device, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return to_device() of each value. While the link is busy, all take no longer than one."""
    if device.type != "cuda":
        return [each.to(device, non_blocking=True) for each in values]
    # All values in one allocation, each aligned for any dtype.
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
    """Return sent_together() of these tensor fields of `source`, by name."""
    there = sent_together(device, [getattr(source, name) for name in names])
    return dict(zip(names, there, strict=True))


def send_into(sends: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write values into target, in place, for each (target, values) of one shape. Targets are
    contiguous and of whole words of 4 bytes. Values are converted to the dtype of the target. On a
    GPU, values of the CPU are sent as by sent_together()."""
    sends = [(target, values.to(target.dtype)) for target, values in sends]
    for target, values in sends:
        assert target.shape == values.shape, (target.shape, values.shape)
    if sends and sends[0][0].device.type != "cuda":
        for target, values in sends:
            target.copy_(values)
        return
    _send(sends)


def received_together(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of one device and dtype on the CPU, which waits for the device once."""
    if not values:
        return []
    sizes = [each.numel() for each in values]
    here = torch.cat([each.flatten() for each in values]).cpu().split_with_sizes(sizes)
    return [part.view(each.shape) for part, each in zip(here, values, strict=True)]


def _send(sends: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write the bytes of values to the start of contiguous targets of whole words on a GPU. Values
    that are there already have the target's shape and dtype."""
    some: list[tuple[torch.Tensor, torch.Tensor]] = []
    num_bytes = 0
    for target, values in sends:
        if values.device == target.device:
            target.copy_(values)
            continue
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
    """Return the number of words that these values take, rounded up to ALIGNMENT."""
    return -(-values.nbytes // ALIGNMENT) * (ALIGNMENT // WORD_BYTES)


class Stage:
    """Ring buffer in pinned memory that the device reads."""

    def __init__(
        self,
        words: torch.Tensor,
        read: Callable[[Sequence[tuple[torch.Tensor, torch.Tensor]]], Event],
    ) -> None:
        """words: int32 on the CPU. read: takes pairs (target, words) of equal size in bytes. Makes
        the device's current stream copy words into targets, and returns the event of that copy."""
        self._words, self._read = words, read
        self._next = 0
        # Ranges that the device may not have read yet, the oldest first: (begin, end, read event).
        self._unread: deque[tuple[int, int, Event]] = deque()
        # Only the scheduler's thread sends; the lock costs little and makes any thread safe.
        self._lock = threading.Lock()

    def send(self, sends: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write the bytes of values to the start of contiguous targets of whole words. All targets
        together must fit into the buffer."""
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
        """Return the range of num_words words. Block the CPU until the device has read them."""
        assert num_words <= len(self._words), "the values do not fit into the buffer"
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
        # One element counts as contiguous with any stride, but a view as bytes needs stride 1.
        values = torch.tensor([values.item()], dtype=values.dtype)
    return values.contiguous().view(-1).view(torch.uint8)


_stages: dict[torch.device, Stage] = {}
_stages_lock = threading.Lock()


def _stage(device: torch.device) -> Stage:
    """Return the one stage of a device. Stages are kept, so that no memory is freed while the
    device reads it."""
    with _stages_lock:
        if device not in _stages:
            words = torch.empty(STAGE_BYTES // WORD_BYTES, dtype=torch.int32, pin_memory=True)
            _stages[device] = Stage(words, _read_by_kernel)
        return _stages[device]


def _read_by_kernel(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Event:
    # Late import: the module loads a kernel, which a CPU does not need.
    from kvspec_kernels.ops.read_host import read_host

    read_host(parts)
    read = torch.cuda.Event()  # type: ignore[no-untyped-call]
    # read_host() launches on the current stream.
    read.record(torch.cuda.current_stream(parts[0][0].device))
    return read
