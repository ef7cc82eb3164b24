"""Inputs of the client for a model: a tokenizer, and texts where acceptance is real."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from acceptance.prompts import cut_prompts
from tokenizers import Tokenizer, models, pre_tokenizers

from serving.points import Model


def folder_with_tokenizer(model: Model, scratch: Path) -> Path:
    """Return the model's folder. For a shape without a tokenizer, return a copy below `scratch`
    that has one.

    bench_serving times tokens by their text, so a server without a tokenizer cannot be measured.
    The generated tokenizer calls token 17 "t17". It has no special tokens, because their text would
    be empty.
    """
    if (model.folder / "tokenizer.json").is_file():
        return model.folder
    folder = scratch / model.folder.name
    folder.mkdir(exist_ok=True)
    shutil.copy(model.folder / "config.json", folder)
    names = {f"t{token}": token for token in range(model.config("vocab_size"))}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"backend": "tokenizers", "tokenizer_class": "TokenizersBackend"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def write_texts(model: Model, count: int, prompt_len: int, seed: int, path: Path) -> None:
    """Write prompts of text outside the model's training data, as bench_serving's `custom` data."""
    windows, _ = cut_prompts(model.folder, count, prompt_len, seed)
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    # Leave out the first token, which the server adds again.
    texts = tokenizer.decode_batch(windows[:, 1:].tolist(), skip_special_tokens=False)
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            # The second turn is never sent, but bench_serving drops conversations without one.
            turns = [{"value": text}, {"value": "an answer"}]
            file.write(json.dumps({"conversations": turns}) + "\n")
