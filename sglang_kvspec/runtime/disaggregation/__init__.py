"""KV of a request that one server computes and another decodes on (Lynx section 4)."""
