"""Parts of bench_transfer.py: two ends in two processes, and runs with faults and fuzzing."""
