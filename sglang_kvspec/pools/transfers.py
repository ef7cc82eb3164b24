"""Small tensors on their way to the device, which nobody waits for.

A copy would go through the engine that brings residuals, and wait there for pages in front of it:
what a verification needs to know came as late as the residuals of the next one. So the CPU lays
values down in pinned memory, and a kernel of the stream that needs them reads them there.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable

import torch

from sglang_kvspec.pools.lanes import Event

# Of pinned memory that values are laid down in. They stay until the device has read them, which it
# does once or twice while a round is given to it.
STAGE_BYTES = 4 << 20
# Larger ones are copied: what they wait for matters less then.
MOST_BYTES = STAGE_BYTES // 8
WORD_BYTES = 4


def sent_to(device: torch.device, values: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the CPU, contiguous. On a GPU it is there for what the current stream
    is given from now on."""
    if device.type != "cuda":
        return values.to(device, non_blocking=True)
    values = values.contiguous()
    if values.nbytes > MOST_BYTES:
        return values.pin_memory().to(device, non_blocking=True)
    num_words = -(-values.nbytes // WORD_BYTES)
    words = torch.empty(num_words, dtype=torch.int32, device=device)
    _stage(device).send(words, values)
    return words.view(torch.uint8)[: values.nbytes].view(values.dtype).view(values.shape)


def send_into(target: torch.Tensor, values: torch.Tensor) -> None:
    """target[...] = values of the same shape, in place; contiguous, of whole words of 4 bytes in
    target's dtype. On a GPU as sent_to() says."""
    values = values.to(target.dtype).contiguous()
    if target.device.type != "cuda" or values.nbytes > MOST_BYTES:
        target.copy_(sent_to(target.device, values), non_blocking=True)
        return
    assert target.shape == values.shape, (target.shape, values.shape)
    _stage(target.device).send(target, values)


class Stage:
    """Memory that the device reads, used round and round."""

    def __init__(
        self, words: torch.Tensor, read: Callable[[torch.Tensor, torch.Tensor], Event]
    ) -> None:
        """words: int32 on the CPU. read: makes the device copy some of them into a tensor of as
        many bytes, behind what its current stream was given; returns when it has."""
        self._words, self._read = words, read
        self._next = 0
        # What the device may still have to read: begin and end, and when it has. The oldest first.
        self._unread: deque[tuple[int, int, Event]] = deque()
        # Threads that receive pages send, too.
        self._lock = threading.Lock()

    def send(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """To a contiguous target of whole words, the first of which take all bytes of values."""
        if not values.nbytes:
            return
        with self._lock:
            begin, end = self._take(target.nbytes // WORD_BYTES)
            words = self._words[begin:end]
            words.view(torch.uint8)[: values.nbytes].copy_(values.view(-1).view(torch.uint8))
            self._unread.append((begin, end, self._read(target, words)))

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


@functools.lru_cache
def _stage(device: torch.device) -> Stage:
    words = torch.empty(STAGE_BYTES // WORD_BYTES, dtype=torch.int32, pin_memory=True)
    return Stage(words, _read_by_kernel)


def _read_by_kernel(target: torch.Tensor, words: torch.Tensor) -> Event:
    # Late: it loads a kernel, which a CPU does without.
    from kvspec_kernels.ops.read_host import read_host

    read_host(target, words)
    read = torch.cuda.Event()  # type: ignore[no-untyped-call]
    read.record(torch.cuda.current_stream(target.device))
    return read
