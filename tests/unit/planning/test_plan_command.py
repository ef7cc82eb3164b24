"""`sglang-kvspec plan` as users run it, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LLAMA = ROOT / "examples" / "models" / "llama-3.1-8b.json"
RUN = "import sys; from sglang_kvspec.cli import main; code = main(); "


def run(*arguments, before="", after="sys.exit(code)", cwd=None):
    source_roots = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "patches"))
    return subprocess.run(
        [sys.executable, "-c", f"{before}{RUN}{after}", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": source_roots},
    )


def test_tables_say_what_to_expect():
    done = run("plan", "--model", LLAMA, "--gpu", "h200", "--target", "int8")
    assert done.returncode == 0, done.stderr
    for words in ("131,072", "35,840 + 32,768", "requests that fit", "limited by", "HBM bandwidth"):
        assert words in done.stdout
    # The sweep ends at the model's context length, and the assumptions are printed.
    assert done.stdout.count("131,072") == 2
    assert "expected, not measured" in done.stdout
    assert "31M parameters" in done.stdout
    # The last line is the whole recommended command.
    command = done.stdout.splitlines()[-1].split()
    assert command[:3] == ["python", "-m", "sglang.launch_server"]
    assert command[-2:] == ["--max-running-requests", "47"]


def test_the_documentation_shows_what_is_printed():
    done = run("plan", "--model", LLAMA.relative_to(ROOT), "--target", "int8", cwd=ROOT)
    table, _, _ = done.stdout.partition("└")
    page = (ROOT / "docs/guides/capacity-planning.md").read_text("utf-8")
    shown = {line.strip() for line in page.splitlines()}
    assert {line.strip() for line in table.splitlines()} <= shown


def test_json_has_the_same_plan(tmp_path):
    (tmp_path / "config.json").write_text(LLAMA.read_text())
    done = run("plan", "--model", tmp_path, "--json", "--acceptance", "0.95", "--context", 8192)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    sizes = {"plain": 131072, "anchor": 35840, "residual": 131072, "stored": 131072}
    assert plan["kv_bytes_per_token"] == sizes
    assert plan["plan"]["plain"]["requests_fit"] == 100
    assert plan["plan"]["fetched"]["speed_up"] >= 1
    assert 0.05 < plan["plan"]["fetched"]["pages_read"] <= 1
    assert plan["launch"][:5] == [
        *["python", "-m", "sglang.launch_server", "--model-path"],
        str(tmp_path),
    ]
    assert [row["context_len"] for row in plan["sweep"]] == [4096 << n for n in range(6)]


def test_residuals_may_be_packed_in_host_memory():
    model = ROOT / "benchmarks" / "serving" / "shapes" / "qwen3-32b"
    plans = {}
    for form in ("raw", "packed"):
        done = run("plan", "--model", model, "--exact-residual", form, "--json")
        assert done.returncode == 0, done.stderr
        plans[form] = json.loads(done.stdout)
    stored = {form: plan["kv_bytes_per_token"]["stored"] for form, plan in plans.items()}
    assert stored == {"raw": 262144, "packed": 140160.0}
    launch = plans["packed"]["launch"]
    assert launch[launch.index("--kvspec-exact-residual") + 1] == "packed"
    assert "--kvspec-exact-residual" not in plans["raw"]["launch"]
    speeds = [plan["plan"]["fetched"]["tokens_per_s"] for plan in plans.values()]
    assert speeds[1] > 1.1 * speeds[0]
    refused = run("plan", "--model", LLAMA, "--exact-residual", "packed", "--codec", "log4")
    assert refused.returncode == 2
    assert "--exact-residual packed needs --target exact, --codec uniform4" in refused.stderr
    useless = run("plan", "--model", LLAMA, "--exact-residual", "packed", "--host-memory-gb", 0)
    assert useless.returncode == 2
    assert "--exact-residual packed has no effect with --host-memory-gb 0" in useless.stderr
    said = run("plan", "--model", LLAMA, "--exact-residual", "auto", "--gpu", "H200").stdout
    assert "Residuals in host memory are raw, because packed residuals" in " ".join(said.split())
    few = ("--host-memory-gb", 50, "--max-running-requests", 64)
    said = run("plan", "--model", LLAMA, "--exact-residual", "auto", "--gpu", "H200", *few).stdout
    assert "Residuals in host memory are packed, because" in " ".join(said.split())


def test_a_fall_back_to_plain_decoding_is_reported():
    done = run("plan", "--model", LLAMA, "--acceptance", "0.1")
    assert done.returncode == 0, done.stderr
    assert "does not pay" in done.stdout


def test_neither_torch_nor_sglang_is_loaded():
    loaded = "sys.exit(str({'torch', 'sglang', 'matplotlib', 'numpy'} & set(sys.modules)))"
    done = run("plan", "--model", LLAMA, after=loaded)
    assert done.stderr.strip() == "set()"


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    done = run("plan", "--model", LLAMA, "--plot", path)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused(tmp_path):
    absent = "import sys; sys.modules['matplotlib'] = sys.modules['matplotlib.figure'] = None; "
    done = run("plan", "--model", LLAMA, "--plot", tmp_path / "plan.png", before=absent)
    assert done.returncode == 2
    assert done.stderr == "sglang-kvspec: --plot needs matplotlib: pip install matplotlib\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "/nowhere.json"), "--model /nowhere.json cannot be read"),
        (("--model", Path(__file__)), "is not JSON"),
        (("--model", LLAMA, "--gpu", "abacus"), "--gpu must be one of"),
        (("--model", "meta-llama/Llama-3.1-8B"), "allowed: a local config.json or the folder"),
        (("--model", ROOT / "examples"), "config.json cannot be read"),
        (("--model", LLAMA, "--context", "0"), "--context must be >= 1"),
        (("--model", LLAMA, "--context", "131073"), "at most 131072, the longest context"),
        (("--model", LLAMA, "--context", "100000000000"), "at most 131072"),
        (("--model", LLAMA, "--acceptance", "1.5"), "from 0 to 1"),
        (("--model", LLAMA, "--acceptance", "/nowhere.json"), "--acceptance /nowhere.json"),
        (("--model", LLAMA, "--acceptance", LLAMA), "no figures named accept.uniform4"),
        (("--model", LLAMA, "--link-gbps", "-1"), "--link-gbps must be positive"),
        (("--model", LLAMA, "--draft-budget", "0"), "--draft-budget must be 'auto' or between"),
        (("--model", LLAMA, "--draft-budget", "all"), "a number between 0.02 and 1, got 'all'"),
        (("--model", LLAMA, "--tp", "5"), "--tp must divide"),
        (("--model", LLAMA, "--page-size", "48"), "--page-size"),
        (("--model", LLAMA, "--plot", "/nowhere/plan.png"), "--plot /nowhere/plan.png"),
    ],
)
def test_wrong_input_is_one_sentence_and_code_2(arguments, words):
    done = run("plan", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.startswith("sglang-kvspec: ")
    assert done.stderr.count("\n") == 1
    assert not done.stdout


def test_compressors_are_listed_with_their_flags():
    done = run("compressors")
    assert done.returncode == 0, done.stderr
    assert "--kvspec-compressor random" in done.stdout
    assert "--kvspec-codec uniform4" in done.stdout
    methods = json.loads(run("compressors", "--json").stdout)
    (control,) = [method for method in methods if method["name"] == "random"]
    assert control["options"] == {"seed": 0}
    assert control["flag"] == "--kvspec-compressor random"
    assert all(method.get("problem") is None for method in methods)
