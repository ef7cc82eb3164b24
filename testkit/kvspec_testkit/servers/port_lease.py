"""TCP ports for servers that several processes start at once."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

# Below the ports that Linux gives to outgoing connections (32768 on), above well-known ones.
_FIRST, _LAST = 12000, 28000
_BLOCK = 3


class PortLease:
    """Two ports of this machine that no other lease names until this one is released.

    A server opens its ports seconds after they were chosen, so finding them free is not enough:
    two servers on one rendezvous port wait for each other forever. A third port, bound here,
    stands for both, and the system frees it when this process ends. Raises OSError where every
    block is taken.
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
        """Safe to call more than once."""
        self._guard.close()


def _blocks() -> Iterator[int]:
    """First ports of all blocks, in an order that differs between processes."""
    blocks = list(range(_FIRST, _LAST, _BLOCK))
    # Not the global generator, which tests seed alike in every process.
    random.SystemRandom().shuffle(blocks)
    yield from blocks


def _bound(port: int) -> socket.socket | None:
    """A socket that holds the port, None where another does."""
    guard = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        guard.bind(("127.0.0.1", port))
        # Bound is not enough: two sockets that both allow reuse may bind, only one may listen.
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
