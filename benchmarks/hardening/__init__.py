"""Parts of bench_hardening.py: generated requests, streams, refusals."""
