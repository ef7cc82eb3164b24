"""Scorers and codecs to measure, by the names that arguments give them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
from acceptance.drafting import PageMap, through_anchor

from compressors.names import BEFORE_ROTARY, PLAIN
from kvspec_kernels.formats import FormatError
from sglang_kvspec.codecs import find_codec, make_codec
from sglang_kvspec.core.compressor import Allocation, Unit, parse_compressor
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.seams import CODECS, SCORERS
from sglang_kvspec.scorers.base import Scorer
from sglang_kvspec.scorers.making import make_scorer

PAGE_SIZE = 64
UNITS: Mapping[Unit, int] = {"pages": PAGE_SIZE, "tokens": 1}
# dtype of the KV whose bytes are counted. Acceptance is measured in fp32.
PLAIN_BYTES = 2
# Codecs whose papers encode K in front of the rotary embedding.
PUBLISHED_BEFORE_ROTARY = ("kvquant",)


@dataclass(frozen=True, slots=True)
class Anchors:
    """Anchors, or plain KV, that drafts read.

    text: as --codecs names it. label: the name in figures. page_map: of exact pages. page_bytes: of
    K and V of a page and KV head, by head size, counted with the model's own KV in 16 bits.
    is_before_rotary: page_map takes and gives K as it is in front of the rotary embedding.
    """

    text: str
    label: str
    page_map: PageMap
    page_bytes: Callable[[int], int]
    is_before_rotary: bool = False


@dataclass(frozen=True, slots=True)
class Chooser:
    """A scorer. label: the name in figures. unit: tokens that are read together. allocation: tokens
    that compete for the budget."""

    label: str
    scorer: Scorer
    unit: int
    allocation: Allocation


def anchors_of(text: str, head_dim: int) -> Anchors:
    """Return the anchors that `plain` or CODEC[:BITS][:before_rotary] names. Raises ConfigError for
    a codec or a number of bits that does not exist, and for sizes that the codec does not take."""
    if text == PLAIN:
        return Anchors(text, PLAIN, lambda k, v: (k, v), _plain_page_bytes)
    codec_text = text.removesuffix(f":{BEFORE_ROTARY}")
    is_before_rotary = codec_text != text
    name, _, bits = codec_text.partition(":")
    if bits and not bits.isdecimal():
        forms = f"{PLAIN} or CODEC[:BITS][:{BEFORE_ROTARY}]"
        raise ConfigError(f"--codecs must be {forms}, got {text!r}")
    chosen = int(bits) if bits else find_codec(name).bit_choices[0]

    def codec_of(size: int, dtype: torch.dtype):  # type: ignore[no-untyped-def]
        return make_codec(
            name,
            target="exact",
            page_size=PAGE_SIZE,
            head_dim=size,
            dtype=dtype,
            anchor_bits=chosen,
        )

    return Anchors(
        text,
        f"{name}_{BEFORE_ROTARY}_{chosen}bit" if is_before_rotary else f"{name}_{chosen}bit",
        through_anchor(codec_of(head_dim, torch.float32)),
        lambda size: codec_of(size, torch.bfloat16).anchor_bytes,
        is_before_rotary,
    )


def _plain_page_bytes(head_dim: int) -> int:
    return 2 * PAGE_SIZE * head_dim * PLAIN_BYTES


def all_anchors(head_dim: int) -> tuple[list[Anchors], dict[str, str]]:
    """Return the anchors of every registered codec with each number of bits, also in front of the
    rotary embedding if that is how they were published, and why others cannot be made for this head
    size, by text."""
    found, refused = [], {}
    for name in CODECS.names():
        ends = ("", f":{BEFORE_ROTARY}") if name in PUBLISHED_BEFORE_ROTARY else ("",)
        for bits, end in product(find_codec(name).bit_choices, ends):
            text = f"{name}:{bits}{end}"
            try:
                found.append(anchors_of(text, head_dim))
            except (ConfigError, FormatError) as error:
                refused[text] = str(error)
    return found, refused


def chooser_of(text: str, by: Unit) -> Chooser:
    """Return the scorer that a value of --kvspec-compressor names, by `by` unless the text asks for
    tokens. Raises ConfigError for a name, an option or a value that does not exist."""
    compressor = parse_compressor(text)
    scorer = make_scorer(compressor)
    label = [compressor.name]
    for key, value in compressor.options.items():
        # A file says nothing about the method.
        label += [] if key == "file" else [key, re.sub(r"[^a-z0-9]+", "_", value.lower())]
    if compressor.by != "pages":
        by = compressor.by
        label += ["by", by]
    if compressor.heads is not None:
        label += ["heads", compressor.heads]
    return Chooser("_".join(label), scorer, UNITS[by], compressor.heads or scorer.allocation)


def options_of(chooser: Chooser) -> dict[str, Any]:
    """Return what a scorer was given, without the folder of a file."""
    found = {
        "scorer": type(chooser.scorer).__name__,
        "unit": chooser.unit,
        "allocation": chooser.allocation,
    }
    for each in fields(chooser.scorer):  # type: ignore[arg-type]
        value = getattr(chooser.scorer, each.name)
        found[each.name] = Path(value).name if each.name == "file" else value
    return found


def all_choosers(by: Unit) -> tuple[list[Chooser], dict[str, str]]:
    """Return every registered scorer with its default options, and why others cannot be made, by
    name."""
    found, refused = [], {}
    for name in SCORERS.names():
        try:
            found.append(chooser_of(name, by))
        except ConfigError as error:
            refused[name] = str(error)
    return found, refused
