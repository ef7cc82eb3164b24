"""Fields that are read from a decode server's meta_info, and values that are refused."""

from __future__ import annotations

import copy

import pytest

from kvspec_testkit.servers.transfer_report import read_transfer_report

META_INFO = {
    "prompt_tokens": 4000,
    "kvspec": {
        "drafted": 12,
        "transfer": {
            "mode": "split",
            "prefill_ended_at": 1795320622.5,
            "seconds": {"anchors": 0.2, "residuals": 1.5, "first_verification": 1.75},
            "drafts_s": [0.3, 0.5, 1.0, 1.6],
            "accepted_first": 4,
            "bytes": {"anchors": 3_456_000, "residuals": 24_576_000},
        },
    },
    "kvspec_token_s": [0, 0.3, 0.5, 1.0, 1.6, 1.75],
}


def changed(path, value):
    meta_info = copy.deepcopy(META_INFO)
    *parents, last = path.split(".")
    place = meta_info
    for name in parents:
        place = place[name]
    place[last] = value
    return meta_info


def test_every_field_is_read():
    report = read_transfer_report(META_INFO)
    transfer = report.transfer
    assert report.token_s == (0.0, 0.3, 0.5, 1.0, 1.6, 1.75)
    assert transfer.mode == "split"
    assert transfer.prefill_ended_at == 1795320622.5
    assert transfer.seconds.anchors == 0.2
    assert transfer.seconds.residuals == 1.5
    assert transfer.seconds.first_verification == 1.75
    assert transfer.drafts_s == (0.3, 0.5, 1.0, 1.6)
    assert transfer.accepted_first == 4
    assert transfer.bytes.anchors == 3_456_000
    assert transfer.bytes.residuals == 24_576_000


@pytest.mark.parametrize(
    ("accepted_first", "residuals", "made", "kept"),
    [(4, 1.5, 3, 3), (2, 1.5, 3, 2), (4, 0.1, 0, 0), (4, 2.0, 4, 4), (4, None, 0, 0)],
)
def test_drafts_made_while_waiting_are_those_before_the_residuals(
    accepted_first, residuals, made, kept
):
    meta_info = changed("kvspec.transfer.seconds.residuals", residuals)
    meta_info["kvspec"]["transfer"]["accepted_first"] = accepted_first
    transfer = read_transfer_report(meta_info).transfer
    assert transfer.drafts_before_residuals == made
    assert transfer.kept_before_residuals == kept


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("kvspec", None, "no kvspec.transfer"),
        ("kvspec.transfer", None, "no kvspec.transfer"),
        ("kvspec_token_s", None, "token_s"),
        ("kvspec.transfer.seconds", {"anchors": 0.1}, "residuals"),
        ("kvspec.transfer.bytes.anchors", "3", r"bytes\.anchors"),
        ("kvspec.transfer.drafts_s", [0.1, "x"], "drafts_s"),
        ("kvspec.transfer.accepted_first", 5, "from 0 to 4, the number of drafts, got 5"),
        ("kvspec.transfer.accepted_first", -1, "from 0 to 4, the number of drafts, got -1"),
    ],
)
def test_anything_else_is_an_error_that_names_the_field(path, value, named):
    with pytest.raises(ValueError, match=named):
        read_transfer_report(changed(path, value))
