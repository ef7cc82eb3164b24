"""Parts of bench_acceptance.py: model, prompts, drafting, variants, report."""
