"""One address in front of prefill and decode servers: `python -m sglang_kvspec.door`.

SGLang's disaggregation wants each request at a prefill and a decode server, with the address where
they meet and a room of its own. The client gets the decode server's answer. See README.md.
"""
