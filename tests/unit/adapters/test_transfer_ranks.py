"""Ranks of prefill and decode servers find each other, and end requests together."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from kvspec_testkit.servers.port_lease import PortLease
from sglang_kvspec.adapters.transfer import decoding, peers, prefill
from sglang_kvspec.adapters.transfer.decode import DecodeManager
from sglang_kvspec.adapters.transfer.directory import (
    Answer,
    Asker,
    part_for,
    query_route,
    ranks_for,
)
from sglang_kvspec.adapters.transfer.peers import Serving, failed
from sglang_kvspec.adapters.transfer.prefill import PrefillManager
from sglang_kvspec.codecs import make_codec
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.runtime.disaggregation.arrivals import ON_ANOTHER_RANK
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.transport import Identity


class OtherRank:
    """Two ranks, of which the other one reports given numbers."""

    size = 2

    def __init__(self, *says: int) -> None:
        self.says, self.about = list(says), None

    def least(self, mine: list[int], about: object) -> list[int]:
        self.about = about
        return [min(pair) for pair in zip(mine, self.says, strict=True)]


@pytest.fixture
def bootstrap():
    """Address of SGLang's own bootstrap server."""
    ports = PortLease()
    server = CommonKVBootstrapServer("127.0.0.1", ports.http)
    address = f"127.0.0.1:{ports.http}"
    deadline = time.monotonic() + 30
    while True:
        try:
            requests.get(f"http://{address}/health", timeout=5)
            break
        except requests.ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    yield address
    server.close()
    ports.release()


def test_every_rank_is_found_where_it_sends_from(bootstrap) -> None:
    args = SimpleNamespace(
        host="0.0.0.0",
        port=1,
        disaggregation_bootstrap_port=int(bootstrap.rpartition(":")[2]),
        kv_cache_dtype="auto",
    )
    for rank in (1, 0):
        manager = object.__new__(PrefillManager)
        manager.address, manager.page_size = f"tcp://10.0.0.1:{500 + rank}", 64
        if rank == 0:
            trouble = query_route(bootstrap, Asker(1, 2)).trouble
            assert "503" in trouble, "one is not there yet"
        manager._register(args, Ranks(rank, 2))
    both = ("tcp://10.0.0.1:500", "tcp://10.0.0.1:501")
    for rank in (0, 1):
        assert query_route(bootstrap, Asker(rank, 2)) == Answer(both[rank : rank + 1], rank)
    assert query_route(bootstrap, Asker(0, 1, num_kv_heads=2)) == Answer(both, 0)
    assert query_route(bootstrap, Asker(3, 4)) == Answer(both[1:], 1, part=(1, 2))


@pytest.mark.parametrize(
    ("asker", "num_ranks", "ranks", "part"),
    [
        (Asker(1, 2, 4), 2, [1], (0, 1)),
        (Asker(0, 1, 4), 4, [0, 1, 2, 3], (0, 1)),
        (Asker(1, 2, 4), 8, [4, 5, 6, 7], (0, 1)),
        (Asker(1, 2, 4), 1, [0], (1, 2)),
        (Asker(2, 4, 4), 2, [1], (0, 2)),
        # Cases that are refused: neither number is a multiple of the other, or there are more ranks
        # than heads.
        (Asker(1, 2, 4), 3, [1], (0, 1)),
        (Asker(2, 3, 4), 2, [1], (0, 1)),
        (Asker(0, 1, 4), 1 << 30, [0], (0, 1)),
    ],
)
def test_which_ranks_have_the_heads_of_one(asker, num_ranks, ranks, part) -> None:
    assert list(ranks_for(asker, num_ranks)) == ranks
    assert part_for(asker, num_ranks) == part


def test_ranks_share_an_emulated_link(monkeypatch) -> None:
    rates = []

    def bucket(rate, *_):
        rates.append(rate)
        raise InterruptedError

    monkeypatch.setattr(prefill, "TokenBucket", bucket)
    for size in (1, 2):
        serving = Serving(KVSpecConfig(link_gbps=3.0), None, None, None, Ranks(0, size))
        with pytest.raises(InterruptedError):
            PrefillManager(None, None, serving)
    assert rates == [3e9, 1.5e9]


def test_an_identity_names_ranks_and_heads(monkeypatch) -> None:
    monkeypatch.setattr(peers, "hash_of_weights", lambda model: "weights")
    monkeypatch.setattr(peers, "hash_of_all_ranks", lambda model, ranks: "all weights")
    monkeypatch.setattr(peers, "portable_fingerprint", lambda config, weights: weights)
    sizes = {"page_size": 64, "head_dim": 64, "dtype": torch.bfloat16}
    geometry = KVGeometry(num_layers=2, num_kv_heads=4, **sizes)

    def identity_of(config: KVSpecConfig, **options: Any) -> Identity:
        codec = make_codec("uniform4", target="exact", **sizes, **options)
        pool = SimpleNamespace(kv=SimpleNamespace(geometry=geometry, codec=codec))
        return Serving(config, pool, None, None, Ranks(1, 2)).identity()

    identity = identity_of(KVSpecConfig())
    assert (identity.tp_shape, identity.rank) == ((2, 4), 1)
    assert (identity.fingerprint, identity.whole) == ("weights", "all weights")
    assert "4-bit anchors" in identity.codec
    assert "2-bit anchors" in identity_of(KVSpecConfig(), anchor_bits=2).codec
    packed = identity_of(KVSpecConfig(exact_residual="packed"), packs=True)
    assert ("raw residuals" in identity.codec, "packed_1 residuals" in packed.codec) == (True, True)
    # Whole pages cross as they are, whatever prefix tiers store.
    whole = [
        identity_of(KVSpecConfig(transfer="full", exact_residual=form), packs=form == "packed")
        for form in ("raw", "packed")
    ]
    assert whole[0].codec == whole[1].codec


def test_a_rank_that_knows_no_reason_says_that_another_does() -> None:
    assert str(failed(7, "the sender was silent")).endswith(": the sender was silent")
    other = failed(7, None)
    assert other.is_from_another_rank, "SGLang logs it where it happened"
    assert "another rank of this server" in str(other)


def request_of(token: int) -> SimpleNamespace:
    return SimpleNamespace(rid=f"r{token}", output_ids=[1, token])


@pytest.mark.parametrize(
    ("wrongs", "says", "found"),
    [
        ([None, None], [1, 1, 5, 6, -5, -6], [None, None]),
        (["wrong prompt", None], [1, 1, 5, 6, -5, -6], ["wrong prompt", None]),
        ([None, "wrong prompt"], [0, 1, 5, 6, -5, -6], [ON_ANOTHER_RANK, "wrong prompt"]),
    ],
)
def test_what_speaks_against_a_request_on_one_rank_does_on_all(wrongs, says, found) -> None:
    ranks, reqs = OtherRank(*says), [request_of(5), request_of(6)]
    assert decoding.shared_refusals(ranks, reqs, wrongs) == found
    assert ranks.about == ["r5", "r6"]


@pytest.mark.parametrize("other", [4, 6])
def test_ranks_begin_with_the_same_token(other) -> None:
    (found,) = decoding.shared_refusals(OtherRank(1, other, -other), [request_of(5)], [None])
    assert found == "the ranks of the prefill server sent different first tokens"


def test_a_single_rank_sends_no_message() -> None:
    assert decoding.shared_refusals(Ranks(), [request_of(5)], ["wrong prompt"]) == ["wrong prompt"]


def test_a_first_token_is_of_its_room() -> None:
    """SGLang's fields follow one another. The last one begins with the room, in eight bytes."""
    last = (1 << 61 | 5).to_bytes(8, "little") + bytes(56)
    assert DecodeManager.is_of_room(last, 1 << 61 | 5)
    assert not DecodeManager.is_of_room(last, 5)
    assert not DecodeManager.is_of_room(bytes(64), 5)
