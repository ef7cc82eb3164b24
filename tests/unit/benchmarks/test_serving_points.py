"""The command line of bench_serving.py: points, servers, and the client's arguments."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
from serving import client, environment
from serving.environment import server_environment
from serving.live_server import counters_between
from serving.points import MAX_CONCURRENCY, Model, Point, label, parse_points
from serving.prompts import folder_with_tokenizer
from serving.systems import SYSTEMS, server_arguments
from tokenizers import Tokenizer

SHAPE = Model.find("8b")


def test_points_of_a_model_come_together():
    found = parse_points(["8b:32k:16,1", "32b:32k:max", "8b:4k:8", "8b:32k:1"])
    assert [point.label for point in found] == [
        "8b.32k.bs16",
        "8b.32k.bs1",
        "8b.4k.bs8",
        "32b.32k.max",
    ]
    assert found[-1].concurrency == MAX_CONCURRENCY


@pytest.mark.parametrize("text", ["8b:32k", "8b:32k:0", "8b:0:1", "8b:x:1", "8b:32k:1,"])
def test_points_that_make_no_sense_are_named(text):
    with pytest.raises(ValueError, match=text):
        parse_points([text])


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match=r"one of 8b, 32b, or a folder .*, got '9b'"):
        parse_points(["9b:32k:1"])


def test_a_folder_with_weights_is_no_dummy(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert Model.find(str(tmp_path)).dummy
    (tmp_path / "model.safetensors").touch()
    assert Model.find(str(tmp_path)) == Model(tmp_path.name, tmp_path, dummy=False)


def test_prompt_and_answer_fit_into_the_model():
    assert Point(SHAPE, 32768, 1).prompt_len(512) == 32768
    assert Point(SHAPE, 131072, 1).prompt_len(512) == 131072 - 512 - 64


def test_every_point_has_a_seed_of_its_own():
    points = parse_points(["8b:4k:1,2,16,64", "8b:32k:1,2,16,64", "8b:128k:1,2,16,64"])
    assert len({point.seed for point in points}) == len(points)


def test_labels_of_contexts():
    assert label("8b", 4096) == "8b.4k"
    assert label("demo", 300, 2) == "demo.300.bs2"


@pytest.mark.parametrize("on_gpu", [True, False])
def test_servers_differ_by_their_own_flags_only(on_gpu):
    found = {
        name: server_arguments(
            SHAPE,
            system,
            on_gpu=on_gpu,
            codec="uniform4",
            max_running=16,
            folder="/shape",
            extra=["--last"],
            extra_kvspec=["--kvspec-draft-len=8"],
        )
        for name, system in SYSTEMS.items()
    }
    # Only plain SGLang selects an attention back end.
    backend = {"--attention-backend=flashinfer"} if on_gpu else set()
    assert all(backend <= set(found[name]) for name in ("bf16", "fp8"))
    plain = [text for text in found["bf16"] if text not in backend]
    assert set(found["fp8"]) - set(plain) - backend == {"--kv-cache-dtype=fp8_e4m3"}
    assert set(found["int8"]) - set(plain) == {
        "--kvspec",
        "--kvspec-target=int8",
        "--kvspec-codec=uniform4",
        "--kvspec-host-gb=0",
        "--kvspec-draft-len=8",
    }
    for arguments in found.values():
        assert set(plain) <= set(arguments)
        assert arguments[-1] == "--last"
    assert ("--device=cpu" in plain) != on_gpu


def test_the_client_sends_tokens_or_texts():
    common = {"prompt_len": 64, "output_len": 1, "num_prompts": 4, "concurrency": 2, "seed": 5}
    tokens = client.arguments("http://x", Path("/m"), **common)
    assert {"--dataset-name=random-ids", "--tokenize-prompt", "--seed=5"} <= set(tokens)
    texts = client.arguments("http://x", Path("/m"), **common, texts=Path("/t"))
    assert {"--dataset-name=custom", "--sharegpt-output-len=4"} <= set(texts)
    assert "--tokenize-prompt" not in texts


def test_a_point_without_time_is_not_begun():
    with pytest.raises(client.OutOfTime):
        client.run([], timeout_s=0)


def test_uncached_tokens_are_those_of_the_worst_request():
    assert client.most_uncached({"input_lens": [100, 100], "cached_tokens": [99, 36]}) == 64


def test_counters_are_those_of_a_point():
    before = {"drafted": 5, "accept_histogram": {"1": 2}, "mean_accept_len": 0.5}
    after = {"drafted": 9, "accept_histogram": {"1": 3, "4": 1}, "mean_accept_len": 0.7}
    assert counters_between(before, after) == {
        "drafted": 4,
        "accept_histogram": {"1": 1, "4": 1},
    }


def test_a_shape_gets_a_tokenizer_whose_every_token_has_a_text(tmp_path):
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps({"vocab_size": 50}))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    folder = folder_with_tokenizer(Model.find(str(shape)), scratch)
    assert folder_with_tokenizer(Model.find(str(folder)), shape) == folder
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert all(tokenizer.decode([token]) == f"t{token}" for token in range(50))


def test_the_replay_is_on_the_path_where_a_curve_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    found = server_environment(tmp_path, tmp_path / "curve.json")
    paths = found["PYTHONPATH"].split(":")
    assert paths[0] == str(environment.ROOT)
    assert str(environment.REPLAY) in paths
    assert paths[-1] == "/theirs"
    assert found["KVSPEC_REPLAY_CURVE"] == str(tmp_path / "curve.json")
    plain = server_environment(tmp_path, None)
    assert str(environment.REPLAY) not in plain["PYTHONPATH"]
    assert "KVSPEC_REPLAY_CURVE" not in plain


def test_entry_points_are_made_up_where_nothing_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "entry_points", lambda group: ())
    folder = tmp_path / "entry_points"
    assert str(folder) in server_environment(tmp_path, None)["PYTHONPATH"].split(":")
    (found,) = importlib.metadata.distributions(path=[str(folder)])
    assert found.name == "sglang-kvspec"
    points = {(point.group, point.name) for point in found.entry_points}
    assert {(group, name) for group, name in points if group.startswith("sglang.")} == {
        ("sglang.srt.plugins", "kvspec"),
        ("sglang.srt.platforms", "kvspec_cpu"),
    }
    assert ("sglang_kvspec.codecs", "uniform4") in points
