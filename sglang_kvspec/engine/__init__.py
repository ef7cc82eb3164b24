"""The loop: plan, draft, verify, commit, launch the next round. Knows nothing of SGLang."""
