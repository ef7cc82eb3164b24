"""Runs with random faults that both ends must survive."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from random import Random

from kvspec_testkit.transport.fuzz import damaged_messages, forged_messages
from kvspec_testkit.transport.loopback import LoopbackLink
from kvspec_testkit.transport.network import SENDER, Faults
from kvspec_testkit.transport.rig import SMALL, Rig

TRANSFERS = (1, 2, 3)
EVENTS = ("cut", "restart sender", "stall", "no credit", "cancel", "abort", "flood")
# Timeout of a transfer, in simulated time of the in-memory network.
TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one run. wrong: what went wrong. None if every transfer was complete and equal, or
    failed with a reason that the run gave, and neither end kept anything."""

    name: str
    completed: int
    failed: int
    wrong: str | None


def run_in_memory(seed: int) -> Outcome:
    random = Random(seed)
    faults = Faults(
        lose=random.choice((0.0, 0.02, 0.2)),
        repeat=random.choice((0.0, 0.05, 0.3)),
        delay=random.choice((0.0, 0.1, 0.5)),
        damage=random.choice((0.0, 0.01, 0.1)),
    )
    events = [random.choice(EVENTS) for _ in range(random.randrange(4))]
    name = f"seed {seed}: {faults}, {events}"
    rig = Rig(seed, faults, vary=random.random() < 0.5)
    ended: set[int] = set()
    try:
        for transfer in TRANSFERS:
            rig.expect(transfer, TIMEOUT_S)
            rig.offer(transfer)
        for event in events:
            for _ in range(random.randint(1, 15)):
                rig.tick()
            _happen(rig, event, random, ended)
        rig.run(2 * TIMEOUT_S, tick_s=0.005)
        _check(rig, ended)
    except Exception as error:
        return Outcome(name, 0, 0, repr(error))
    failed = len(rig.failures())
    return Outcome(name, len(TRANSFERS) - failed, failed, None)


def _happen(rig: Rig, event: str, random: Random, ended: set[int]) -> None:
    if event == "cut":
        rig.step_sender()
        rig.network.cut()
    elif event == "restart sender":
        rig.network.unplug(SENDER)
        rig.sender = rig.make_sender()
        rig.sources.clear()
        for transfer in TRANSFERS:
            if rig.receiver.missing(transfer) is not None:
                rig.offer(transfer)
    elif event == "stall":
        for _ in range(random.randint(1, 1000)):
            rig.step_sender()
            rig.network.carry()
            rig.clock.now_s += 0.005
    elif event == "no credit":
        rig.receiver.grant(0)
        for _ in range(random.randint(1, 100)):
            rig.tick()
        rig.receiver.grant(SMALL.total_bytes)
    elif event == "flood":
        for name, port in rig.network.ports.items():
            origin = b"receiver" if name == SENDER else b""
            for message in islice(damaged_messages(rig.seed), 50):
                port.inbox.append((origin, message))
            for message in islice(forged_messages(rig.seed), 50):
                port.inbox.append((origin, message))
    else:
        transfer = random.choice(TRANSFERS)
        ended.add(transfer)
        if event == "cancel":
            rig.receiver.cancel(transfer, "request aborted")
        else:
            rig.sender.abort(transfer, "request aborted")


def _check(rig: Rig, ended: set[int]) -> None:
    failures = rig.failures()
    assert failures.keys() <= ended, failures
    for transfer in TRANSFERS:
        if transfer not in failures:
            rig.check_arrived(transfer)
    rig.network.faults = Faults()
    for _ in range(1000):
        rig.tick(0.01)
    # A restarted sender does not learn what the receiver cancelled, so the caller must abort these
    # transfers.
    for transfer in ended:
        rig.sender.abort(transfer, "request aborted")
    for _ in range(100):
        rig.tick(0.01)
    rig.check_nothing_left()


def run_on_loopback(seed: int) -> Outcome:
    """Run one transfer of 11 MB through a proxy that damages, cuts and stalls."""
    random = Random(seed)
    damage_every = random.choice((0, 10_000_000, 3_000_000))
    events = [random.choice(("cut", "stall", "restart sender")) for _ in range(3)]
    name = f"loopback {seed}: one byte in {damage_every}, {events}"
    link = LoopbackLink()
    try:
        address = link.listen()
        proxy = link.proxy(address, damage_every=damage_every)
        link.dial(proxy.address)
        link.start()
        for event in events:
            goal = link.received_bytes() + random.randint(1, 2_500_000)
            link.until(lambda goal=goal: link.received_bytes() >= goal)  # type: ignore[misc]
            if event == "cut":
                proxy.cut()
            elif event == "stall":
                proxy.flows.clear()
                for _ in range(random.randint(1, 150)):
                    link.turn()
                proxy.flows.set()
            else:
                link.close_sender()
                link.listen(address)
                link.offer()
        link.complete()
    except Exception as error:
        return Outcome(name, 0, 0, repr(error))
    finally:
        link.close()
    return Outcome(name, 1, 0, None)
