"""How soon a decode server has tokens, by what KV crosses in."""
