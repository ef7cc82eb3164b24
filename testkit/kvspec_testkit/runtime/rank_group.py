"""Helpers of scripts that run as one of several ranks: python SCRIPT RANK SIZE RENDEZVOUS."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from sglang_kvspec.core.errors import RanksDisagree
from sglang_kvspec.runtime.ranks import Ranks

R = TypeVar("R", bound=Ranks)


@contextmanager
def this_rank(kind: type[R]) -> Iterator[R]:
    """Yield the rank that the command line names, joined with the others on the CPU."""
    rank, size, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    group = dist.new_group(list(range(size)), backend="gloo")
    yield kind(rank, size, group, group)
    dist.destroy_process_group()


def refusal(call: Callable[[], object]) -> str:
    """Return the reason for which ranks disagree in a call, or "" if they agree."""
    try:
        call()
    except RanksDisagree as error:
        return str(error)
    return ""
