"""Parts of check_releases.py: names of SGLang that KVSpec uses, compared without installing it."""
