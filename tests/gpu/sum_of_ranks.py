"""One rank of test_all_reduce.py: `python sum_of_ranks.py RANK RANKS MEETING [ALGORITHM]`.

Sums rows over all ranks as a deterministic SGLang server does, in batches of different sizes, and
exits with an error if a row's bits depend on its batch. MEETING: a file by which ranks find each
other, which must not exist yet. ALGORITHM: a value for NCCL_ALGO instead of the server's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from sglang.srt.distributed import (
    get_tp_group,
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.distributed.parallel_state import set_custom_all_reduce
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo-5m"
HIDDEN = 4096
ROWS = 8192
# A step, verifications, chunks of a prompt.
COUNTS = (1, 2, 13, 64, 65, 208, 999, 4096)


def main() -> None:
    rank, ranks = map(int, sys.argv[1:3])
    # The arguments choose NCCL's algorithm, by a variable of the environment.
    args = ServerArgs(model_path=str(MODEL), tp_size=ranks, enable_deterministic_inference=True)
    if sys.argv[4:]:
        os.environ["NCCL_ALGO"] = sys.argv[4]
    set_global_server_args_for_scheduler(args)
    set_custom_all_reduce(not args.disable_custom_all_reduce)
    torch.cuda.set_device(rank)
    init_distributed_environment(ranks, rank, f"file://{sys.argv[3]}", rank, "nccl")
    initialize_model_parallel(ranks)
    torch.manual_seed(rank)
    rows = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16()
    whole = get_tp_group().all_reduce(rows.clone())
    differ = []
    for count in COUNTS:
        for start in {0, 123, ROWS - count}:
            part = slice(start, start + count)
            total = get_tp_group().all_reduce(rows[part].clone())
            if not torch.equal(total, whole[part]):
                differ.append((start, count))
    torch.distributed.destroy_process_group()
    if differ:
        sys.exit(f"rank {rank} of {ranks}: rows differ in (start, count) {differ}")


if __name__ == "__main__":
    main()
