"""Under any fault between two servers, a request is answered right or fails with a reason, and no
page stays allocated."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import zmq.auth
from harness.models import DEMO_MODEL
from harness.pair import Pair, PairSpec, running_pair, wait_until
from harness.pair_faults import (
    Round,
    assert_nothing_left,
    cut_in_use,
    lost_sessions,
    register,
    registered,
    residuals_on_their_way,
    stopped,
)
from harness.references import PlainReference, Workload
from harness.scenarios import STRICT_CHECKS
from harness.servers import Announce, ServerSwitch

from kvspec_testkit.transport.proxy import Proxy
from sglang_kvspec.transport.session import Timing

pytestmark = [pytest.mark.server, pytest.mark.identity]

POOL = "--max-total-tokens=24576"
# Residuals of 1000 tokens take about three seconds, so that faults meet transfers.
SLOW_LINK = "--kvspec-link-gbps=0.002"
WORKLOAD = Workload(DEMO_MODEL, (64, 127, 1500, 300, 1025, 65), max_new_tokens=48)
FAMILIES = False
PAIR = PairSpec(
    DEMO_MODEL,
    (POOL, "--chunked-prefill-size=512"),
    prefill=(SLOW_LINK,),
    environment=dict(STRICT_CHECKS.environment),
)
TIMING = Timing()


@pytest.fixture
def all_is_well(pair: Pair, reference: PlainReference) -> Iterator[None]:
    """Check after the test that both servers answer right, and hold no pages."""
    yield
    client = pair.client
    assert Round(client, reference.suite.prompts[:2]).finish(reference) == []
    assert_nothing_left(client)


def begin(pair: Pair, reference: PlainReference, host: str = "127.0.0.1") -> Round:
    """Send all prompts, and return once residuals are on the link."""
    client = pair.client_by(host)
    round_ = Round(client, reference.suite.prompts)
    wait_until(lambda: residuals_on_their_way(client), "residuals are on their way")
    return round_


@pytest.mark.usefixtures("all_is_well")
def test_a_prefill_server_that_stalls(pair: Pair, reference: PlainReference) -> None:
    """Stall for longer than a connection may be silent, but not longer than transfers survive."""
    round_ = begin(pair, reference)
    client = pair.client
    lost = lost_sessions(client.kvspec_report())
    with stopped(pair.prefill):
        wait_until(lambda: lost_sessions(client.kvspec_report()) > lost, "the link is lost")
        requests.get(f"{pair.decode.base_url}/health", timeout=10).raise_for_status()
    assert round_.finish(reference) == []


@pytest.mark.usefixtures("all_is_well")
def test_a_prefill_server_that_is_killed_and_started_again(
    pair: Pair, reference: PlainReference
) -> None:
    round_ = begin(pair, reference)
    pair.prefill.kill()
    pair.restart_prefill()
    errors = round_.finish(reference)
    assert errors
    assert all("silent for" in e or "no longer listens" in e or "no link" in e for e in errors), (
        errors
    )


@pytest.mark.usefixtures("all_is_well")
def test_a_decode_server_that_is_killed_and_started_again(
    pair: Pair, reference: PlainReference
) -> None:
    client = pair.client
    posted = []
    for task in reference.suite.prompts:
        body = {
            "input_ids": list(task.input_ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": task.max_new_tokens},
            **client.room(),
        }
        posted.append(client.prefill_only(body))
        client.decode_only(body)
    wait_until(lambda: residuals_on_their_way(client), "residuals are on their way")
    pair.decode.kill()
    pair.restart_decode()
    for thread in posted:
        thread.join(TIMING.gone_s + 60)
        assert not thread.is_alive(), "a request of the prefill server waits for ever"
    assert client.prefill_errors
    assert all("the receiver was silent" in error for error in client.prefill_errors)


@pytest.mark.usefixtures("all_is_well")
@pytest.mark.parametrize(("host", "damage_every"), [("localhost", 0), ("127.1", 3_000_000)])
def test_a_link_that_is_cut_and_damaged(
    pair: Pair, reference: PlainReference, announce: Announce, host: str, damage_every: int
) -> None:
    """Cut the link, or damage about one frame in ten. Each case uses another host name of this
    machine, as a decode server has one link to each name."""
    direct = registered(pair)
    proxy = Proxy(direct, damage_every=damage_every)
    register(pair, proxy.address)
    try:
        round_ = begin(pair, reference, host)
        cut_in_use(proxy, times=3)
        assert round_.finish(reference) == []
        announce(f"{proxy.num_connections} connections, {proxy.num_damaged} bytes damaged")
        assert proxy.num_connections > 3
        assert bool(proxy.num_damaged) == bool(damage_every)
    finally:
        register(pair, direct)
        proxy.close()


@pytest.mark.usefixtures("all_is_well")
def test_an_abort_on_the_prefill_side_alone(pair: Pair, reference: PlainReference) -> None:
    client = pair.client
    round_ = Round(client, reference.suite.prompts)
    wait_until(lambda: residuals_on_their_way(client), "residuals are on their way")
    requests.post(
        f"{client.prefill.base_url}/abort_request", json={"abort_all": True}, timeout=30
    ).raise_for_status()
    errors = round_.finish(reference)
    assert errors
    # The reason must not be "silent for", which a link would report after waiting in vain.
    assert all("the sender ended the transfer" in error for error in errors), errors


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--kvspec-codec=log4", "--kvspec-codec must be the same on both ends"),
        ("--kvspec-target=int8", "--kvspec-target must be the same on both ends"),
        ("--dtype=bfloat16", "model must be the same on both ends"),
    ],
)
def test_a_decode_server_of_another_kind_is_refused(
    pair: Pair, reference: PlainReference, flag: str, words: str
) -> None:
    """All requests fail with the refusal, before any time limit."""
    pair.restart_decode(flag)
    errors = Round(pair.client, reference.suite.prompts[:4]).finish(reference)
    assert len(errors) == 4
    assert all(words in error for error in errors), errors


def test_a_decode_server_of_the_same_kind_is_accepted(
    pair: Pair, reference: PlainReference
) -> None:
    """Start a matching server after the refused ones."""
    pair.restart_decode()
    assert Round(pair.client, reference.suite.prompts[:2]).finish(reference) == []


def make_keys(folder: Path) -> dict[str, Path]:
    """Make folders for --kvspec-transfer-keys: two servers that know each other, and a stranger
    that knows the prefill server."""
    folders = {name: folder / name for name in ("prefill", "decode", "stranger")}
    for place in folders.values():
        (place / "peers").mkdir(parents=True)
        zmq.auth.create_certificates(place, "own")
    for name, peer in (("prefill", "decode"), ("decode", "prefill"), ("stranger", "prefill")):
        shutil.copy(folders[peer] / "own.key", folders[name] / "peers" / f"{peer}.key")
    return folders


def test_only_servers_that_know_each_other_talk(
    reference: PlainReference, servers: ServerSwitch, tmp_path: Path, announce: Announce
) -> None:
    servers.release()
    keys = {name: f"--kvspec-transfer-keys={path}" for name, path in make_keys(tmp_path).items()}
    spec = PairSpec(DEMO_MODEL, (POOL,), prefill=(keys["prefill"],), decode=(keys["decode"],))
    with running_pair(spec, tmp_path, announce) as pair:
        prompts = reference.suite.prompts[:2]
        assert Round(pair.client, prompts).finish(reference) == []
        assert_nothing_left(pair.client)
        pair.restart_decode(keys["stranger"])
        errors = Round(pair.client, prompts).finish(reference)
        assert len(errors) == 2
        assert all("check the keys of both servers" in error for error in errors), errors
