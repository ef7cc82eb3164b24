"""Ports of a lease belong to its holder alone."""

from __future__ import annotations

import socket

from kvspec_testkit.servers import port_lease
from kvspec_testkit.servers.port_lease import PortLease


def test_leases_never_share_a_port():
    leases = [PortLease() for _ in range(20)]
    ports = [port for lease in leases for port in (lease.http, lease.rendezvous)]
    assert len(set(ports)) == 40
    for lease in leases:
        lease.release()


def test_leased_ports_can_be_opened():
    lease = PortLease()
    for port in (lease.http, lease.rendezvous):
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
            server.listen(1)
    lease.release()
    lease.release()


def test_a_block_with_a_port_in_use_is_passed_over(monkeypatch):
    held = PortLease()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        taken = other.getsockname()[1]
        blocks = [held.http - 1, taken, taken - 1, taken - 2, held.http + 2]
        monkeypatch.setattr(port_lease, "_blocks", lambda: iter(blocks))
        lease = PortLease()
    assert lease.http == held.http + 3
    for each in (held, lease):
        each.release()
