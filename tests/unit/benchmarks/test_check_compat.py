"""Results of check_compat.py: counts of tests and answers, and which releases pass."""

from __future__ import annotations

import json
from dataclasses import replace

import check_compat
from check_compat import Outcome

GOOD = Outcome("0.5.17", 2, (), 1, 30, 0, 60.0, {"torch": "2.11.0"})
TESTS = """<testsuites><testsuite name="pytest">
<testcase classname="tests.a" name="passes"/>
<testcase classname="tests.a" name="fails"><failure>no</failure></testcase>
<testcase classname="tests.b" name="has_no_server"><error>no</error></testcase>
<testcase classname="tests.b" name="is_left_out"><skipped/></testcase>
</testsuite></testsuites>"""


def test_failures_and_errors_are_named(tmp_path):
    path = tmp_path / "tests.xml"
    path.write_text(TESTS)
    assert check_compat.read_tests(path) == (1, ("tests.a.fails", "tests.b.has_no_server"), 1)


def test_a_run_without_identity_tests_has_no_answers(tmp_path):
    path = tmp_path / "identity.json"
    assert check_compat.read_identity(path) == (0, 0)
    figures = [
        {"name": "identity.answers", "value": 7},
        {"name": "identity.mismatches", "value": 2},
    ]
    path.write_text(json.dumps({"figures": figures}))
    assert check_compat.read_identity(path) == (7, 2)


def test_a_release_counts_if_nothing_failed(tmp_path):
    bad = [
        replace(GOOD, failed=("tests.a.fails",)),
        replace(GOOD, mismatches=1),
        replace(GOOD, passed=0),
    ]
    outcomes = [GOOD, *bad]
    assert [outcome.is_good for outcome in outcomes] == [True, False, False, False]
    path = tmp_path / "compat.json"
    check_compat.write_results(path, outcomes, everything=False)
    record = json.loads(path.read_text())
    figures = {each["name"]: each["value"] for each in record["figures"]}
    assert figures["compat.releases"] == 1
    assert figures["compat.failed"] == 1
    assert figures["compat.mismatches"] == 1
    assert [each["release"] for each in record["settings"]["raw"]] == ["0.5.17"] * 4


def test_a_run_is_resumed_only_at_its_commit_and_with_its_tests(tmp_path, monkeypatch):
    path = tmp_path / "compat.json"
    tests = check_compat.SAMPLE
    assert check_compat.read_outcomes(path, tests) == []
    outcomes = [GOOD, replace(GOOD, release="0.5.18", failed=("tests.a.fails",))]
    check_compat.write_results(path, outcomes, everything=False)
    commit = json.loads(path.read_text())["commit"].removesuffix("-dirty")

    def read(commit, tests):
        path.write_text(json.dumps({**json.loads(path.read_text()), "commit": commit}))
        return check_compat.read_outcomes(path, tests)

    monkeypatch.setattr(check_compat, "current_commit", lambda path: commit)
    assert read(commit, tests) == outcomes
    assert read(commit, check_compat.EVERYTHING) == []
    assert read("another", tests) == []
    monkeypatch.setattr(check_compat, "current_commit", lambda path: f"{commit}-dirty")
    assert read(f"{commit}-dirty", tests) == []
