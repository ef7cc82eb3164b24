"""What bench_acceptance.py is made of: model, prompts, drafting, variants, report."""
