"""A network in memory between one sender and its receivers, with a clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from sglang_kvspec.transport.port import Hold
from sglang_kvspec.transport.wire import Buffer

SENDER = b"sender"
# What a real socket would take before it says no.
MAX_QUEUED = 1024


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances per message: never to arrive, to arrive twice, behind later ones, or damaged."""

    lose: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    damage: float = 0.0


NO_FAULTS = Faults()


@dataclass(slots=True)
class _Message:
    """Memory is read when the message leaves, as with ZMQ: payload None by then."""

    peer: bytes
    head: bytes
    payload: memoryview | None
    done: bool = False


class Network:
    def __init__(self, seed: int, faults: Faults = NO_FAULTS) -> None:
        self.clock = Clock()
        self.faults = faults
        self._random = Random(seed)
        self.ports: dict[bytes, NetworkPort] = {}
        self.num_messages = 0
        self.num_faults = 0

    def port(self, name: bytes) -> NetworkPort:
        """The sender's port, or that of a receiver of this name."""
        self.ports[name] = NetworkPort(self, name)
        return self.ports[name]

    def accepts(self, origin: bytes, peer: bytes) -> bool:
        target = self.ports.get(peer if origin == SENDER else SENDER)
        return target is not None and len(self.ports[origin].outbox) < MAX_QUEUED

    def carry(self) -> int:
        """Move everything that was sent to where it arrives, with faults. Returns messages."""
        moved = 0
        for origin, port in list(self.ports.items()):
            while port.outbox:
                message = port.outbox.popleft()
                parts: list[bytes] = [message.head]
                if message.payload is not None:
                    parts.append(bytes(message.payload))
                message.done = True
                target = self.ports.get(message.peer if origin == SENDER else SENDER)
                if target is not None:
                    self._deliver(target, b"" if origin == SENDER else origin, parts)
                moved += 1
        self.num_messages += moved
        return moved

    def cut(self) -> None:
        """Every connection breaks: what is under way in either direction is gone."""
        for port in self.ports.values():
            port.drop_all()

    def unplug(self, name: bytes) -> None:
        """An end dies: nothing reaches it, and sending to it is refused."""
        self.ports.pop(name).drop_all()

    def _deliver(self, target: NetworkPort, origin: bytes, parts: list[bytes]) -> None:
        faults, chance = self.faults, self._random.random
        if chance() < faults.lose:
            self.num_faults += 1
            return
        if chance() < faults.damage:
            self.num_faults += 1
            parts = self._damage(parts)
        target.inbox.append((origin, parts))
        if chance() < faults.repeat:
            self.num_faults += 1
            target.inbox.append((origin, parts))
        if chance() < faults.delay:
            self.num_faults += 1
            # Ahead of some that were sent before it.
            target.inbox.insert(self._random.randint(0, len(target.inbox)), target.inbox.pop())

    def _damage(self, parts: Sequence[bytes]) -> list[bytes]:
        damaged = [bytearray(part) for part in parts]
        victim = self._random.choice([part for part in damaged if part])
        victim[self._random.randrange(len(victim))] ^= self._random.randint(1, 255)
        return [bytes(part) for part in damaged]


class NetworkPort:
    """A Port of the network."""

    def __init__(self, network: Network, name: bytes) -> None:
        self._network = network
        self.name = name
        self.outbox: deque[_Message] = deque()
        self.inbox: deque[tuple[bytes, list[bytes]]] = deque()
        self.num_resets = 0
        self.is_closed = False

    def send(self, peer: bytes, head: bytes, payload: memoryview | None = None) -> Hold | None:
        if not self._network.accepts(self.name, peer):
            return None
        message = _Message(peer, head, payload)
        self.outbox.append(message)
        return message

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        if not self.inbox:
            return None
        peer, parts = self.inbox.popleft()
        return peer, list(parts)

    def wait(self, timeout_s: float) -> bool:
        return False

    def wake(self) -> None:
        pass

    def reset(self) -> None:
        self.num_resets += 1
        self.drop_all()

    def close(self) -> None:
        self.is_closed = True

    def drop_all(self) -> None:
        for message in self.outbox:
            message.done = True
        self.outbox.clear()
        self.inbox.clear()
