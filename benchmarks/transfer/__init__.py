"""Parts of bench_transfer.py: two ends in two processes, and what is asked of them."""
