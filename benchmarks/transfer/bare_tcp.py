"""Speed of a plain TCP socket on loopback with the same cores.

There are no frames and no checksums, and all bytes are copied into the same place.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from multiprocessing.connection import Connection

_CHUNK_BYTES = 240 << 10


def bare_tcp_gbps(num_bytes: int) -> float:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    cores = sorted(os.sched_getaffinity(0))
    receiver = context.Process(target=_receive, args=(cores[-1], num_bytes, theirs))
    receiver.start()
    port = ours.recv()
    sending = context.Process(target=_send_to, args=(cores[0], num_bytes, port))
    sending.start()
    gbps: float = ours.recv()
    sending.join()
    receiver.join()
    return gbps


def _receive(core: int, num_bytes: int, pipe: Connection) -> None:
    os.sched_setaffinity(0, {core})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        peer, _ = listener.accept()
        target = memoryview(bytearray(_CHUNK_BYTES))
        left, start_s = num_bytes, time.perf_counter()
        while left > 0 and (num_read := peer.recv_into(target)):
            left -= num_read
        pipe.send(num_bytes / (time.perf_counter() - start_s) / 1e9)
        while peer.recv_into(target):
            pass
        peer.close()


def _send_to(core: int, num_bytes: int, port: int) -> None:
    os.sched_setaffinity(0, {core})
    chunk = bytes(_CHUNK_BYTES)
    with socket.create_connection(("127.0.0.1", port)) as peer:
        for _ in range(-(-num_bytes // _CHUNK_BYTES)):
            peer.sendall(chunk)
