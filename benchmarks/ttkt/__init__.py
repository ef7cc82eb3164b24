"""Parts of bench_ttkt.py: servers, requests, points, figures and tables."""
