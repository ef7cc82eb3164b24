"""TCP ports for servers that several processes start at once."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

# Below the ports that Linux gives to outgoing connections (32768 on), above well-known ones.
_FIRST, _LAST = 12000, 28000
_BLOCK = 3


class PortLease:
    """Two ports of this machine that no other lease names until this lease is released.

    A server opens its ports seconds after they are chosen, so a check for free ports is not enough.
    Two servers on one rendezvous port would wait for each other forever. The lease therefore binds
    a third port, which stands for both. The system frees this port when the process ends. Raises
    OSError if every block is taken.
    """

    def __init__(self) -> None:
        for block in _blocks():
            guard = _bound(block)
            if guard is None:
                continue
            if all(_is_free(port) for port in (block + 1, block + 2)):
                self._guard = guard
                self.http, self.rendezvous = block + 1, block + 2
                return
            guard.close()
        raise OSError(f"no {_BLOCK} neighbouring ports are free from {_FIRST} to {_LAST}")

    def release(self) -> None:
        """Release the ports. Safe to call more than once."""
        self._guard.close()


def _blocks() -> Iterator[int]:
    """Yield the first ports of all blocks, in an order that differs between processes."""
    blocks = list(range(_FIRST, _LAST, _BLOCK))
    # Do not use the global generator: tests seed it alike in every process.
    random.SystemRandom().shuffle(blocks)
    yield from blocks


def _bound(port: int) -> socket.socket | None:
    """Return a socket that holds the port, or None if another socket does."""
    guard = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        guard.bind(("127.0.0.1", port))
        # Binding is not enough: of two sockets that allow reuse, both may bind, one may listen.
        guard.listen(1)
    except OSError:
        guard.close()
        return None
    return guard


def _is_free(port: int) -> bool:
    probe = _bound(port)
    if probe is None:
        return False
    probe.close()
    return True
