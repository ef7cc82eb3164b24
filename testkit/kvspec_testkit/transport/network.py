"""In-memory network between one sender and its receivers, with its own clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from sglang_kvspec.transport.port import Hold
from sglang_kvspec.transport.wire import Buffer

SENDER = b"sender"
# Messages that a real socket would queue before it refuses more.
MAX_QUEUED = 1024


class Clock:
    """Clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities that a message is lost, arrives twice, out of order, or damaged."""

    lose: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    damage: float = 0.0


NO_FAULTS = Faults()


@dataclass(slots=True)
class _Message:
    """Message in an outbox. Its payload's memory is read when the message leaves, as with ZMQ.

    payload: None for a message of one part. done: True when the memory is no longer read.
    """

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
        """Make the port of the sender, or of a receiver of this name."""
        self.ports[name] = NetworkPort(self, name)
        return self.ports[name]

    def accepts(self, origin: bytes, peer: bytes) -> bool:
        target = self.ports.get(peer if origin == SENDER else SENDER)
        return target is not None and len(self.ports[origin].outbox) < MAX_QUEUED

    def carry(self) -> int:
        """Deliver all sent messages, with faults. Returns the number of messages."""
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
        """Break every connection: messages in flight are lost, in both directions."""
        for port in self.ports.values():
            port.drop_all()

    def unplug(self, name: bytes) -> None:
        """End a port's process: no message reaches it, and sending to it is refused."""
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
            # Move the message ahead of some that were sent before it.
            target.inbox.insert(self._random.randint(0, len(target.inbox)), target.inbox.pop())

    def _damage(self, parts: Sequence[bytes]) -> list[bytes]:
        damaged = [bytearray(part) for part in parts]
        victim = self._random.choice([part for part in damaged if part])
        victim[self._random.randrange(len(victim))] ^= self._random.randint(1, 255)
        return [bytes(part) for part in damaged]


class NetworkPort:
    """Port of the in-memory network."""

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
