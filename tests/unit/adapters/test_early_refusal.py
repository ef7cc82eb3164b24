"""Command lines that are checked while SGLang is being imported, and their refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang_kvspec.adapters.early_refusal import check_arguments, refuse_early, server_arguments
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.seams import CODECS

PYTHON = "/env/bin/python"
SERVE = "/env/bin/sglang"
SPAWNED = [PYTHON, "-c", "from multiprocessing.spawn import spawn_main; spawn_main()", "--fork"]
WRONG = ["--kvspec", "--kvspec-codec", "zip"]
LAUNCHED = [PYTHON, "-X", "importtime", "-m", "sglang.launch_server", *WRONG]


@pytest.mark.parametrize(
    ("original", "current"),
    [
        (LAUNCHED, ["-m", *WRONG]),
        ([PYTHON, SERVE, "serve", *WRONG], [SERVE, "serve", *WRONG]),
    ],
)
def test_command_lines_of_servers_are_checked(original, current):
    assert server_arguments(original, current) == WRONG


@pytest.mark.parametrize(
    ("original", "current"),
    [
        # Processes that a server spawns, with the server's command line.
        (SPAWNED, ["/site/sglang/launch_server.py", *WRONG]),
        (SPAWNED, [SERVE, "serve", *WRONG]),
        (SPAWNED, ["-c", "--fork"]),
        # Scripts that use sglang.Engine, with flags of their own.
        ([PYTHON, "mine.py", *WRONG], ["mine.py", *WRONG]),
        ([PYTHON, "-m", "mine", *WRONG], ["-m", *WRONG]),
        ([PYTHON, "-m", "pytest", *WRONG], ["/site/pytest/__main__.py", *WRONG]),
        ([PYTHON], [""]),
        ([PYTHON], []),
        # Commands of SGLang that serve no language model.
        ([PYTHON, SERVE, "generate", *WRONG], [SERVE, "generate", *WRONG]),
        ([PYTHON, "-m", "sglang.launch_server", *WRONG, "--help"], ["-m", *WRONG, "--help"]),
        (
            [PYTHON, SERVE, "serve", "--model-type", "diffusion", *WRONG],
            [SERVE, "serve", "--model-type", "diffusion", *WRONG],
        ),
    ],
)
def test_other_processes_are_left_alone(original, current):
    assert server_arguments(original, current) is None


def test_a_wrong_flag_ends_the_process_with_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "orig_argv", LAUNCHED)
    monkeypatch.setattr(sys, "argv", ["-m", *WRONG])
    with pytest.raises(SystemExit) as stop:
        refuse_early()
    assert stop.value.code == 2
    sentence = f"--kvspec-codec must be one of {', '.join(CODECS.built_in)}, got 'zip'"
    assert capsys.readouterr().err == f"sglang-kvspec: error: {sentence}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--kvspec --kvspec-codec", "--kvspec-codec: expected one argument"),
        ("--kvspec --kvspec-colour red", "--kvspec-colour is not a flag .*--kvspec-codec"),
        ("--kvspec --kvspec_codec log4", "--kvspec_codec is not a flag .*--kvspec-codec"),
        ("--kvspec --kvspec-cod zip", "--kvspec-codec must be one of"),
        ("--kvspec --kvspec-codec=zip", "--kvspec-codec must be one of"),
        ("--kvspec --kvspec-host-gb -1", "--kvspec-host-gb must be >= 0"),
        ("--kvspec-codec log4", "--kvspec-codec has no effect without --kvspec"),
        ("--kvspec yes", "--kvspec must be true or false"),
        ("--kvspec --kvspec-prefix ours", "ambiguous option: --kvspec-prefix"),
    ],
)
def test_what_is_refused(arguments, expected):
    with pytest.raises(ConfigError, match=expected):
        check_arguments(["--model-path", "m", *arguments.split()])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--kvspec"],
        ["--trust-remote-code", "--kvspec", "--kvspec-draft-len", "7", "--port", "1"],
        ["--kvspec", "--kvspec-prefix-gb", "4", "--kvspec-prefix-d", "x"],
        ["--kvspec", "--kvspec-codec", "zip", "--kvspec-codec", "log4"],
        ["--chat-template", "--kvspec is text here"],
        ["--k", "no flag of this group"],
        ["--config"],
        ["--config", "/nowhere.yaml", "--kvspec-codec", "zip"],
    ],
)
def test_what_is_left_to_sglang(arguments):
    check_arguments(arguments)


def test_a_config_file_counts(tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text("kvspec: true\ntrust-remote-code: true\nlora-paths: [a, b]\nkvspec-codec: zip")
    with pytest.raises(ConfigError, match="--kvspec-codec must be one of"):
        check_arguments(["--config", str(path)])
    check_arguments(["--config", str(path), "--kvspec-codec", "log4"])


def test_a_refusal_precedes_the_heavy_imports():
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "m",
    ]
    run = subprocess.run([*command, *WRONG], capture_output=True, text=True, timeout=120)
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert run.returncode == 2
    assert f"--kvspec-codec must be one of {', '.join(CODECS.built_in)}, got 'zip'" in run.stderr
    assert "torch" in imported
    assert imported.isdisjoint({"transformers", "sglang.srt.server_args"})
