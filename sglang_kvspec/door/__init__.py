"""The front door of prefill and decode servers that run apart: `python -m sglang_kvspec.door`.

SGLang wants every such request at both a prefill and a decode server, with the address where they
meet and a room that nobody else has; the client gets the decode server's answer. See README.md.
"""
