"""Ranks of a server in SGLang's terms: their numbers, devices and shared memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from sglang_kvspec.runtime.ranks import Ranks


def ranks_of(group: Any) -> Ranks:
    """Return the Ranks of `group`, SGLang's GroupCoordinator of TP ranks."""
    return Ranks(group.rank_in_group, group.world_size, group.cpu_group, group.device_group)


def shard_of(ranks: Ranks) -> str:
    """Return the name of this rank's part of the model's KV heads, for a StoreIdentity."""
    return f"{ranks.rank}/{ranks.size}"


def device_of(runner: Any) -> torch.device:
    """Return the device of this rank. runner: SGLang's model runner."""
    if runner.device == "cpu":
        return torch.device("cpu")
    return torch.device(runner.device, runner.gpu_id)


def ranks_on_a_machine(server_args: Any) -> int:
    """Return how many ranks share a machine's host memory, at most."""
    return -(-int(server_args.tp_size) // int(server_args.nnodes))


def ranks_on_a_numa_node(server_args: Any) -> int:
    """Return how many ranks share a NUMA node, at most. On a CPU, SGLang counts the memory of a
    node as one rank's."""
    from sglang_kvspec.adapters.compat.processors import get_cpu_ids_by_node

    return -(-ranks_on_a_machine(server_args) // len(get_cpu_ids_by_node()))


def least_of_all_ranks(value: int) -> int:
    """Return the least value of all ranks, which must call this together. A page has one number on
    all ranks, so their pools must hold equally many pages."""
    from sglang_kvspec.adapters.compat.parallel_state import get_world_group

    world = get_world_group()
    if world.world_size == 1:
        return value
    least = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=world.cpu_group)
    return int(least)
