"""The passes that a server under test runs, first and again."""

from __future__ import annotations

import pytest
from serving import client, live_server
from serving.live_server import LiveServer
from serving.points import Model, Point

POINT = Point(Model.find("8b"), 1024, 2)


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """Return a function that measures a decode pass, and says what the server was asked for."""
    asked: list[str] = []

    def run(self, point, prompt_len, output_len, waves, texts):
        asked.append(f"{output_len} tokens")
        return {"ttfts": [0.1, 0.1], "itls": [[0.1] * 8] * 2}

    monkeypatch.setattr(LiveServer, "_run", run)
    monkeypatch.setattr(LiveServer, "flush", lambda self: asked.append("flush"))
    monkeypatch.setattr(
        LiveServer, "info", lambda self, *_: {"version": "0", "internal_states": [{}]}
    )
    monkeypatch.setattr(client, "most_uncached", lambda result: 0)
    monkeypatch.setattr(client, "summary", lambda result: None)
    monkeypatch.setattr(live_server, "hbm_used_gib", lambda: None)

    def measure(**options):
        asked.clear()
        facts = {"system": "bf16", "acceptance": ""}
        server = LiveServer(None, tmp_path, tmp_path, 1e9, facts)
        record = server.measure(POINT, 8, ("decode",), 1, real_text=False, **options)
        assert record.decode_rate is not None
        return list(asked)

    return measure


def test_a_decode_pass_computes_its_prompts_first(sent):
    assert sent() == ["flush", "1 tokens", "8 tokens"]


def test_a_repeat_of_a_decode_pass_sends_cached_prompts_once(sent):
    assert sent(is_cached=True) == ["8 tokens"]
