"""_setup_and_run_http_server: checks request bodies before SGLang's endpoints see them.

SGLang 0.5.17 answers some invalid bodies with status 500 and a traceback.
"""

from __future__ import annotations

from typing import Any


def hook(server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    from sglang_kvspec.adapters.activation import config_of
    from sglang_kvspec.adapters.body_gate import BodyGate

    if config_of(server_args) is not None:
        app.add_middleware(BodyGate, vocab_size=tokenizer_manager.model_config.vocab_size)
