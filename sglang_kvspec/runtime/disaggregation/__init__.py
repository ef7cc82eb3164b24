"""Disaggregation: KV that one server computes and another server decodes on (Lynx section 4)."""
