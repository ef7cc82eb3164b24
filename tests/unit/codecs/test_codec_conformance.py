"""Conformance tests of every codec, of this project or of another package.

All codecs that an entry point names are tested here, so an installed package tests its own by
running this file. The toy codec of tests/plugins is tested without being installed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvspec_kernels.codecs import CodecSpec, FormatError
from kvspec_kernels.codecs.fields import RECORD_ALIGNMENT, exact_fields, record_bytes
from kvspec_kernels.formats import EXACT_DTYPES, Target
from kvspec_kernels.jit.functions import kernel_function
from kvspec_kernels.reference.attention import PageReader, WindowTail, attend, paged_attention
from kvspec_kernels.reference.codec import reference_of
from kvspec_testkit.doc_examples import load_example
from sglang_kvspec.codecs import find_codec, make_codec
from sglang_kvspec.codecs.record_codec import RecordCodec
from sglang_kvspec.core.codec_names import codec_names
from sglang_kvspec.core.errors import ConfigError

MakeCodec = Callable[..., RecordCodec]

TOY_CODEC = Path(__file__).parents[2] / "plugins" / "toy_codec.py"
SIZES = [(32, 32), (64, 64), (96, 128), (256, 32)]
INTEGERS = {2: torch.int16, 4: torch.int32}


def _toy() -> ModuleType:
    spec = spec_from_file_location("toy_codec", TOY_CODEC)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # The codec's reference functions are imported by this module name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _declared() -> Iterator[type[CodecSpec]]:
    for name in codec_names():
        yield find_codec(name)
    if "toy" not in codec_names():
        yield _toy().ToySettings
    yield load_example("new-codec.md").Round4Settings


def _has_int8(declared: type[CodecSpec]) -> bool:
    try:
        declared.for_page(64, declared.bit_choices[0]).correction_fields(64, 64)
    except FormatError:
        return False
    return True


DECLARED = list(_declared())
WITH_INT8 = [declared for declared in DECLARED if _has_int8(declared)]
VARIANTS = [(declared, bits) for declared in DECLARED for bits in declared.bit_choices]
BY_TARGET = [(*variant, "exact") for variant in VARIANTS] + [
    (declared, bits, "int8") for declared, bits in VARIANTS if declared in WITH_INT8
]


def _bound_to_sizes(declared: type[CodecSpec], bits: int, target: Target) -> MakeCodec:
    def make(page_size=64, head_dim=64, dtype=torch.float32) -> RecordCodec:
        settings = declared.for_page(page_size, bits)
        return RecordCodec(settings, target, page_size, head_dim, dtype)

    return make


@pytest.fixture(params=VARIANTS, ids=lambda variant: f"{variant[0].name}-{variant[1]}bit")
def variant(request: pytest.FixtureRequest) -> tuple[type[CodecSpec], int]:
    """A declared codec, and a number of anchor bits that it offers."""
    return request.param


@pytest.fixture
def exact_codec_of(variant) -> MakeCodec:
    """Return a function that binds the variant to sizes, with the target exact."""
    return _bound_to_sizes(*variant, "exact")


@pytest.fixture(params=BY_TARGET, ids=lambda case: f"{case[0].name}-{case[1]}bit-{case[2]}")
def codec_of(request: pytest.FixtureRequest) -> MakeCodec:
    """Return a function that binds a variant to sizes, with each target that the codec has."""
    return _bound_to_sizes(*request.param)


@pytest.fixture(
    params=[case for case in BY_TARGET if case[2] == "int8"],
    ids=lambda case: f"{case[0].name}-{case[1]}bit",
)
def int8_codec_of(request: pytest.FixtureRequest) -> MakeCodec:
    """Return a function that binds a variant with the target int8 to sizes."""
    return _bound_to_sizes(*request.param)


def test_a_declaration_is_a_constant_that_can_be_compared_and_stored(variant):
    declared, bits = variant
    settings = declared.for_page(64, bits)
    assert settings.anchor_bits == bits
    assert settings == declared.for_page(64, bits)
    assert hash(settings) == hash(declared.for_page(64, bits))
    assert json.loads(json.dumps(dataclasses.asdict(settings))) == dataclasses.asdict(settings)
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
        settings.anchor_bits = 3
    assert reference_of(settings).__name__ == settings.reference


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
@pytest.mark.parametrize(("page_size", "head_dim"), SIZES)
def test_exact_residuals_give_back_every_bit(exact_codec_of, dtype, page_size, head_dim):
    codec = exact_codec_of(page_size, head_dim, dtype)
    bits = INTEGERS[dtype.itemsize]
    limits = torch.iinfo(bits)
    rng = torch.Generator().manual_seed(0)
    # The bits include NaN, infinities and denormals.
    shape = (2, 2, page_size, 3, head_dim)
    drawn = torch.randint(limits.min, limits.max, shape, generator=rng).to(bits)
    k, v = drawn.view(dtype)
    anchor, residual = codec.encode(k, v)
    restored = codec.decode_target(anchor, residual), codec.decode_exact(residual)
    for pages in restored:
        for got, want in zip(pages, drawn, strict=True):
            assert got.dtype == dtype
            assert torch.equal(got.view(bits), want)
    assert torch.equal(codec.encode_exact(k, v), residual)


@pytest.mark.parametrize(("page_size", "head_dim"), SIZES)
def test_drafts_are_finite_and_err_by_less_than_the_values(
    exact_codec_of, cache_like_pages, page_size, head_dim
):
    codec = exact_codec_of(page_size, head_dim)
    pages = cache_like_pages(page_size=page_size, head_dim=head_dim)
    for draft, want in zip(codec.decode_anchor(codec.encode(*pages).anchor), pages, strict=True):
        assert draft.isfinite().all()
        assert ((draft - want).abs() <= want.abs().amax((1, 3), keepdim=True)).all()


@pytest.mark.parametrize(("page_size", "head_dim"), SIZES)
def test_int8_errs_by_two_steps_of_8_bits_at_most(
    int8_codec_of, cache_like_pages, page_size, head_dim
):
    codec = int8_codec_of(page_size, head_dim)
    pages = cache_like_pages(page_size=page_size, head_dim=head_dim)
    for got, want in zip(codec.decode_target(*codec.encode(*pages)), pages, strict=True):
        # A head's largest value is 128 steps. Rounding costs half a step. Corrections of 4 bits,
        # which reach 7 steps up where 8 would be nearest, cost one step.
        largest = want.abs().amax((1, 3), keepdim=True)
        assert ((got - want).abs() <= largest / 64).all()


@pytest.mark.parametrize(
    "declared",
    [declared for declared in DECLARED if declared not in WITH_INT8],
    ids=lambda declared: declared.name,
)
def test_a_codec_without_corrections_refuses_int8_in_one_sentence(declared):
    message = rf"the codec {declared.name} has no int8 target \(allowed: --kvspec-target exact\)$"
    for bits in declared.bit_choices:
        with pytest.raises(FormatError, match=f"^{message}"):
            _bound_to_sizes(declared, bits, "int8")()
    if declared.name in codec_names():
        sizes = {"page_size": 64, "head_dim": 64, "dtype": torch.bfloat16}
        with pytest.raises(ConfigError, match=f"^--kvspec-codec {declared.name}: {message}"):
            make_codec(declared.name, target="int8", **sizes)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_values_spoil_only_their_own_record(codec_of, cache_like_pages, bad):
    codec = codec_of()
    k, v = cache_like_pages(num=2)
    clean = codec.encode(k, v)
    k[1, 9, 0, 3] = v[1, 9, 0, 3] = bad
    dirty = codec.encode(k, v)
    for got, want in zip(dirty, clean, strict=True):
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1, 1], want[1, 1])
    codec.decode_anchor(dirty.anchor)
    codec.decode_target(*dirty)


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_drafts_of_the_largest_values_stay_finite(exact_codec_of, dtype):
    codec = exact_codec_of(dtype=dtype)
    page = torch.full((1, 64, 2, 64), torch.finfo(dtype).max, dtype=dtype)
    page[:, ::2] *= -1
    page[:, :, :, ::3] *= 0.5
    for draft in codec.decode_anchor(codec.encode(page, page).anchor):
        assert draft.isfinite().all()


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
@pytest.mark.parametrize(("page_size", "head_dim"), SIZES)
def test_byte_counts_are_the_sizes_of_records(
    codec_of, cache_like_pages, page_size, head_dim, dtype
):
    codec = codec_of(page_size, head_dim, dtype)
    sizes = (page_size, head_dim)
    pages = cache_like_pages(num=2, page_size=page_size, heads=3, head_dim=head_dim, dtype=dtype)
    anchor, residual = codec.encode(*pages)
    if codec.target == "exact":
        residual_fields = exact_fields(*sizes, str(dtype).removeprefix("torch."))
    else:
        residual_fields = codec.settings.correction_fields(*sizes)
    for records, nbytes, fields in (
        (anchor, codec.anchor_bytes, codec.settings.anchor_fields(*sizes)),
        (residual, codec.residual_bytes, residual_fields),
    ):
        assert records.dtype == torch.uint8
        assert records.shape == (2, 3, nbytes)
        assert nbytes == record_bytes(fields)
        assert nbytes % RECORD_ALIGNMENT == 0
    assert codec.anchor_bits_per_element == codec.anchor_bytes * 8 / (2 * page_size * head_dim)
    assert codec.anchor_bits_per_element >= codec.settings.anchor_bits


@pytest.mark.parametrize(("page_size", "head_dim"), SIZES)
def test_fields_tile_a_record_and_the_rest_is_zero(codec_of, cache_like_pages, page_size, head_dim):
    codec = codec_of(page_size, head_dim)
    records = codec.encode(*cache_like_pages(page_size=page_size, head_dim=head_dim))
    for layout, found in zip((codec.anchor_layout, codec.residual_layout), records, strict=True):
        fields = layout.fields
        assert fields[0].offset == 0
        for one, following in pairwise(fields):
            assert one.offset + one.nbytes == following.offset
        end = fields[-1].offset + fields[-1].nbytes
        assert end <= layout.nbytes < end + RECORD_ALIGNMENT
        assert len({field.name for field in fields}) == len(fields)
        assert all(field.offset % field.dtype.itemsize == 0 for field in fields)
        assert not found[..., end:].any()


def test_a_record_depends_on_its_own_page_and_head_alone(codec_of, cache_like_pages):
    codec = codec_of()
    k, v = cache_like_pages(num=3, heads=2)
    together = codec.encode(k, v)
    drafts, targets = codec.decode_anchor(together.anchor), codec.decode_target(*together)
    for page in range(3):
        for head in range(2):
            at = (slice(page, page + 1), slice(head, head + 1))
            alone = codec.encode(k[at[0], :, at[1]], v[at[0], :, at[1]])
            # Views into tables of records, as pools give them.
            parts = [records[at] for records in together]
            assert torch.equal(alone.anchor, parts[0])
            assert torch.equal(alone.residual, parts[1])
            for got, whole in zip(codec.decode_anchor(parts[0]), drafts, strict=True):
                assert torch.equal(got, whole[at[0], :, at[1]])
            for got, whole in zip(codec.decode_target(*parts), targets, strict=True):
                assert torch.equal(got, whole[at[0], :, at[1]])


def test_no_pages_are_no_records(codec_of):
    codec = codec_of()
    none = torch.zeros(0, 64, 2, 64)
    records = codec.encode(none, none)
    assert records.anchor.shape == (0, 2, codec.anchor_bytes)
    for pages in codec.decode_anchor(records.anchor) + codec.decode_target(*records):
        assert pages.shape == none.shape


@pytest.mark.parametrize("source", ["anchor", "target"])
def test_reference_attention_reads_what_decoding_gives(codec_of, cache_like_pages, source):
    codec = codec_of()
    num_pages, heads, last = 3, 2, 17
    records = codec.encode(*cache_like_pages(num=num_pages, heads=heads))
    order, slots = torch.tensor([2, 0, 1]), torch.tensor([1, 2, 0])
    residuals = torch.empty_like(records.residual)
    residuals[slots] = records.residual
    reader = PageReader(
        codec.settings,
        "anchor" if source == "anchor" else codec.target,
        codec.page_size,
        codec.head_dim,
        codec.dtype,
        records.anchor,
        residuals,
        slots,
    )
    decoded = (
        codec.decode_anchor(records.anchor) if source == "anchor" else codec.decode_target(*records)
    )
    rng = torch.Generator().manual_seed(1)
    q = torch.randn((2, 2 * heads, codec.head_dim), generator=rng)
    window = torch.randn((2, 1, codec.page_size, heads, codec.head_dim), generator=rng)
    tail_len, past_len = 5, 2 * codec.page_size + last
    ends = torch.tensor([0, 1])
    tail = WindowTail(*window, ends, torch.tensor([0]), torch.tensor([tail_len]))
    out, lse = paged_attention(
        q,
        reader,
        torch.tensor([0, num_pages]),
        order,
        torch.tensor([last]),
        qo_indptr=torch.tensor([0, len(q)]),
        tail=tail,
    )
    k, v = (
        torch.cat((pages[order].flatten(0, 1)[:past_len], recent[0, :tail_len]))
        for pages, recent in zip(decoded, window, strict=True)
    )
    num_seen = past_len + torch.tensor([tail_len - 1, tail_len])
    want_out, want_lse = attend(q, k, v, num_seen, codec.head_dim**-0.5)
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)


def test_kernels_read_fields_that_exist_or_are_refused(codec_of):
    codec = codec_of()
    settings = codec.settings
    if not settings.has_kernels:
        for ask in (settings.triton_encode, lambda: settings.triton_decode(64)):
            with pytest.raises(FormatError, match=f"the codec {codec.name} has no Triton kernels"):
                ask()
        assert settings.cuda_encode(64) is settings.cuda_attention() is None
        return
    encode, decode = settings.triton_encode(), settings.triton_decode(64)
    for function in (encode.encode_k, encode.encode_v, decode.function):
        assert callable(kernel_function(function))
    for part in "kv":
        for name in ("codes", decode.scale, decode.offset, *encode.metadata):
            assert codec.anchor_layout[f"{part}_{name}"].nbytes
        if codec.target == "int8":
            assert codec.residual_layout[f"{part}_codes"].nbytes
