"""The loop: plan, draft, verify, commit, launch the next round. The engine imports no SGLang."""
