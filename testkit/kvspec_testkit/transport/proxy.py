"""A TCP proxy on loopback that can cut connections, damage bytes, slow down and stop reading."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from random import Random

# Spared so that connections get through their handshake: damage to ZMTP greetings is not tested.
SPARED_BYTES = 4096
_CHUNK_BYTES = 64 << 10


class Proxy:
    """TCP proxy of `target` (tcp://host:port). damage_every: mean number of bytes from the target
    to the client for each damaged byte; 0 for no damage."""

    def __init__(self, target: str, *, damage_every: int = 0, seed: int = 0) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._damage_every, self._random = damage_every, Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self.num_connections = 0
        self.num_damaged = 0
        self.num_forwarded = 0
        # Speed of each connection from the target to the client; None for no limit.
        self.bytes_per_s: float | None = None
        # While cleared, the proxy stops reading, and TCP pushes back.
        self.flows = threading.Event()
        self.flows.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break every connection, even within a message."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                _shut(end)

    def close(self) -> None:
        _shut(self._listener)
        self.flows.set()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                _shut(client)
                continue
            server.settimeout(None)
            with self._lock:
                self._pairs.append((client, server))
                self.num_connections += 1
            for pair in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, origin: socket.socket, target: socket.socket, damages: bool) -> None:
        total = 0
        try:
            while chunk := bytearray(origin.recv(_CHUNK_BYTES)):
                self.flows.wait()
                if damages and self._damage_every and total > SPARED_BYTES:
                    self._damage(chunk)
                if damages and self.bytes_per_s is not None:
                    time.sleep(len(chunk) / self.bytes_per_s)
                target.sendall(chunk)
                total += len(chunk)
                self.num_forwarded += len(chunk)
        except OSError:
            pass
        _shut(origin)
        _shut(target)

    def _damage(self, chunk: bytearray) -> None:
        if self._random.random() < len(chunk) / self._damage_every:
            chunk[self._random.randrange(len(chunk))] ^= self._random.randint(1, 255)
            self.num_damaged += 1


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
