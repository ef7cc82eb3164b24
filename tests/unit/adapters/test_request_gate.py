"""Requests that are refused before a scheduler receives them. All other requests pass."""

from __future__ import annotations

import copy
import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_kvspec.adapters.request_gate import (
    check_raw,
    check_sampling,
    check_tokens,
    note_pool,
    pool_pages_of,
)

VOCAB = 100
PAGES = 384
NAN, INF = float("nan"), float("inf")

NOT_INTEGERS = (1.5, 2.0, "x", "3", True, [], [1], {}, NAN, INF, 2**63, -(2**63) - 1, 10**30)
NOT_NUMBERS = ("x", "0.5", True, [], [0.5], {}, NAN, INF, -INF, 10**400)
NOT_SWITCHES = (2, -1, 0.5, "true", [], {}, NAN)
NOT_TEXTS = (5, 0.5, True, ["x"], {}, b"x")
WRONG = {
    "n": (*NOT_INTEGERS, None, 0, -1, PAGES + 1, 100_000, 2**62),
    "max_new_tokens": (*NOT_INTEGERS, -1),
    "min_new_tokens": (*NOT_INTEGERS, -1),
    "stream_interval": (*NOT_INTEGERS, -1),
    "top_k": NOT_INTEGERS,
    "sampling_seed": NOT_INTEGERS,
    "temperature": NOT_NUMBERS,
    "top_p": NOT_NUMBERS,
    "min_p": NOT_NUMBERS,
    "frequency_penalty": NOT_NUMBERS,
    "presence_penalty": NOT_NUMBERS,
    "repetition_penalty": NOT_NUMBERS,
    "ignore_eos": NOT_SWITCHES,
    "skip_special_tokens": NOT_SWITCHES,
    "spaces_between_special_tokens": NOT_SWITCHES,
    "no_stop_trim": NOT_SWITCHES,
    "ebnf_full_assistant": NOT_SWITCHES,
    "json_schema": NOT_TEXTS,
    "regex": NOT_TEXTS,
    "ebnf": NOT_TEXTS,
    "structural_tag": NOT_TEXTS,
    "stop": (5, True, {}, [5], ["x", None], [["x"]], b"x"),
    "stop_regex": (
        5,
        {},
        [5],
        "(",
        ")",
        "[",
        "*",
        "a{2,1}",
        ["a", "("],
        "(" * 5000,
        "a{99999999999}",
    ),
    "stop_token_ids": (5, "5", {}, [1.5], ["5"], [True], [[5]], [2**63], [NAN]),
    "logit_bias": (
        *(5, "x", [], [[1, 2]]),
        *({"x": 1.0}, {"": 1.0}, {"1.5": 1.0}, {None: 1.0}),
        *({"1": value} for value in (*NOT_NUMBERS, None, 1e39, -1e39)),
    ),
    "custom_params": (5, "x", [], [1]),
    # Fields that do not exist, or that only SGLang sets.
    "max_tokens": (5,),
    "x" * 60: (5,),
    "is_normalized": (True, False),
    "stop_strs": (["x"],),
}


def request(**fields):
    return GenerateReqInput(**{"text": "x", **fields})


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_wrong_sampling_parameters_are_refused(name, value):
    with pytest.raises(ValueError, match=name) as refusal:
        check_raw(request(sampling_params={name: value}), PAGES)
    assert len(str(refusal.value)) < 1000
    with pytest.raises(ValueError, match=name):
        check_raw(request(text=["x", "y"], sampling_params=[{}, {name: value}]), PAGES)


@pytest.mark.parametrize("value", [2, 0, "x", True])
def test_beam_search_is_refused(value):
    """SGLang has it since 0.5.19. In other releases the name is unknown."""
    with pytest.raises(ValueError, match="beam_width"):
        check_raw(request(sampling_params={"beam_width": value}), PAGES)


@pytest.mark.parametrize(
    "value", [{"enabled": True}, {"key": "7"}, {"enabled": False, "key": "7"}, {}, "x"]
)
def test_watermarks_are_refused(value):
    """SGLang has them since 0.5.22. In other releases the name is unknown."""
    with pytest.raises(ValueError, match="watermark"):
        check_raw(request(sampling_params={"watermark": value}), PAGES)
    if hasattr(GenerateReqInput, "watermark"):
        for fields in ({"watermark": value}, {"text": ["x", "y"], "watermark": [None, value]}):
            with pytest.raises(ValueError, match="watermark"):
                check_raw(request(**fields), PAGES)


@pytest.mark.skipif(not hasattr(GenerateReqInput, "watermark"), reason="SGLang lacks watermarks")
def test_a_request_may_ask_for_no_watermark():
    for value in (None, {"enabled": False}):
        check_raw(request(watermark=value, sampling_params={"watermark": value}), PAGES)


@pytest.mark.parametrize("rows", ["x", 5, ["x"], [None], [{}, 5], [[]], [{}, [{}]]])
def test_sampling_parameters_must_be_objects(rows):
    with pytest.raises(ValueError, match="sampling_params"):
        check_raw(request(text=["x", "y"], sampling_params=rows), PAGES)


def test_samples_are_bounded_by_the_pool_once_it_is_known():
    params = {"n": PAGES + 1}
    check_raw(request(sampling_params=params), None)
    check_raw(request(sampling_params=params), PAGES + 1)
    with pytest.raises(ValueError, match=f"at most {PAGES}.*got {PAGES + 1}"):
        check_raw(request(sampling_params=params), PAGES)


def test_the_pool_is_counted_in_whole_pages():
    class Manager:
        class server_args:
            page_size = 64

    manager = Manager()
    assert pool_pages_of(manager) is None
    note_pool(manager, 64 * PAGES + 63)
    assert pool_pages_of(manager) == PAGES


MISMATCHED = [
    ("n", {"text": "x", "sampling_params": [{"n": 1}]}),
    ("sampling_params", {"text": "x", "sampling_params": [{}]}),
    ("sampling_params", {"input_ids": [1, 2], "sampling_params": [{}, {}]}),
    ("sampling_params", {"text": ["x", "y"], "sampling_params": [{}]}),
    ("sampling_params", {"text": "x", "sampling_params": []}),
    ("sampling_params", {"input_ids": [[1], [2]], "sampling_params": [{}] * 3}),
    ("rid", {"text": "x", "rid": ["a"]}),
    ("rid", {"text": ["x", "y"], "rid": ["a"]}),
    ("top_logprobs_num", {"text": "x", "top_logprobs_num": [1]}),
    ("top_logprobs_num", {"text": ["x", "y"], "top_logprobs_num": [1, 2, 3]}),
    ("top_logprobs_num", {"input_ids": [[1], [2]], "top_logprobs_num": []}),
    ("logprob_start_len", {"input_ids": [1], "logprob_start_len": [0]}),
    ("logprob_start_len", {"text": ["x"], "logprob_start_len": [0, 0]}),
    ("return_logprob", {"text": ["x", "y"], "return_logprob": [True]}),
    ("return_sampling_mask", {"text": ["x", "y"], "return_sampling_mask": [True]}),
    ("lora_path", {"text": ["x", "y"], "lora_path": ["a"]}),
    ("extra_key", {"text": ["x", "y"], "extra_key": ["a", "b", "c"]}),
    ("bootstrap_host", {"text": ["x", "y"], "bootstrap_host": ["h"]}),
    ("bootstrap_port", {"text": ["x", "y"], "bootstrap_port": [1]}),
    ("bootstrap_room", {"text": ["x", "y"], "bootstrap_room": [1]}),
    ("custom_logit_processor", {"text": ["x", "y"], "custom_logit_processor": ["a"]}),
    ("token_ids_logprob", {"text": ["x", "y"], "token_ids_logprob": [[1]]}),
    ("return_logprob", {"text": "x", "return_logprob": [True], "sampling_params": {"n": 2}}),
    ("multi_item_delimiter_indices", {"text": ["x", "y"], "multi_item_delimiter_indices": [[1]]}),
    (
        "multi_item_delimiter_indices",
        {
            "text": ["x", "y"],
            "multi_item_delimiter_indices": [[1], [2]],
            "sampling_params": {"n": np.int64(2)},
        },
    ),
    ("token_ids_logprob", {"text": ["x", "y"], "token_ids_logprob": [[1], [2], [3]]}),
    # Since 0.5.21.
    *[
        ("sampling_logprobs_mode", {"text": ["x", "y"], "sampling_logprobs_mode": ["support"]}),
    ]
    * hasattr(GenerateReqInput, "sampling_logprobs_mode"),
]


@pytest.mark.parametrize(("name", "fields"), MISMATCHED)
def test_lists_must_fit_the_prompts(name, fields):
    with pytest.raises(ValueError, match=name):
        check_raw(GenerateReqInput(**fields), PAGES)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("text, input_ids or input_embeds", {}),
        ("input_ids", {"input_ids": []}),
        ("input_embeds", {"input_embeds": []}),
        ("input_embeds", {"input_embeds": [[]]}),
        ("input_embeds", {"input_embeds": "x"}),
        ("input_embeds", {"input_embeds": [5]}),
        ("positional_embed_overrides", {"text": "x", "positional_embed_overrides": [1]}),
        ("positional_embed_overrides", {"text": "x", "positional_embed_overrides": []}),
        ("positional_embed_overrides", {"text": "x", "positional_embed_overrides": {"a": 1}}),
        ("session_params", {"text": "x", "session_params": {"id": "a", "wat": 1}}),
        ("session_params", {"text": "x", "session_params": [1]}),
    ],
)
def test_unusable_prompts_and_fields_are_refused(name, fields):
    with pytest.raises(ValueError, match=name):
        check_raw(GenerateReqInput(**fields), PAGES)


@pytest.mark.parametrize("token", [-1, -(2**63), VOCAB, VOCAB + 1, 2**62])
@pytest.mark.parametrize("place", [0, 2])
def test_token_ids_must_be_in_the_vocabulary(token, place):
    ids = [0, 5, VOCAB - 1]
    ids[place] = token
    with pytest.raises(ValueError, match=f"input_ids.*{VOCAB - 1}.*got {token}"):
        check_tokens(GenerateReqInput(input_ids=ids), ids, VOCAB)


@pytest.mark.parametrize("prompt", [{"text": ""}, {"input_ids": []}])
def test_prompts_without_tokens_are_refused(prompt):
    with pytest.raises(ValueError, match="no tokens"):
        check_tokens(GenerateReqInput(**prompt), [], VOCAB)


@pytest.mark.parametrize("number", [VOCAB + 1, 100_000, 2**62])
def test_top_logprobs_must_be_in_the_vocabulary(number):
    obj = request(return_logprob=True, top_logprobs_num=number)
    with pytest.raises(ValueError, match=f"top_logprobs_num.*{VOCAB}.*got {number}"):
        check_tokens(obj, [1], VOCAB)


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1, 10**30])
def test_priorities_must_fit_64_bits(priority):
    with pytest.raises(ValueError, match="priority"):
        check_tokens(request(priority=priority), [1], VOCAB)


# Requests that pass

VALID_FIELDS = {
    "n": st.sampled_from([1, 2, PAGES]),
    "max_new_tokens": st.none() | st.integers(10, 2**62),
    "min_new_tokens": st.none() | st.integers(0, 10),
    "stream_interval": st.none() | st.integers(0, 100),
    "top_k": st.none() | st.just(-1) | st.integers(1, 2**31),
    "sampling_seed": st.none() | st.integers(-(2**63), 2**63 - 1),
    "temperature": st.none() | st.floats(0, 1e30) | st.integers(0, 3),
    "top_p": st.none() | st.floats(1e-6, 1.0) | st.just(1),
    "min_p": st.none() | st.floats(0, 1) | st.just(0),
    "frequency_penalty": st.none() | st.floats(-2, 2),
    "presence_penalty": st.none() | st.integers(-2, 2),
    "repetition_penalty": st.none() | st.floats(0.01, 2),
    "ignore_eos": st.none() | st.booleans(),
    "skip_special_tokens": st.none() | st.booleans(),
    "spaces_between_special_tokens": st.none() | st.booleans(),
    "no_stop_trim": st.none() | st.booleans(),
    "json_schema": st.none() | st.just("") | st.just('{"type": "object"}'),
    "stop": st.none() | st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "stop_regex": st.none() | st.sampled_from([r"\d+", "", [], [r"\w{2}", "a|b"]]),
    "stop_token_ids": st.none() | st.lists(st.integers(0, VOCAB - 1) | st.none(), max_size=3),
    "logit_bias": st.none()
    | st.dictionaries(
        st.integers(0, VOCAB - 1).map(str), st.floats(-3.4e38, 3.4e38) | st.integers(-100, 100)
    ),
    "custom_params": st.none() | st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
}


@given(params=st.fixed_dictionaries({}, optional=VALID_FIELDS))
def test_parameters_that_pass_are_those_sglang_takes(params):
    before = copy.deepcopy(params)
    check_raw(request(sampling_params=params), PAGES)
    assert params == before
    made = SamplingParams(**params)
    made.verify(VOCAB)
    made.normalize(_Tokenizer())


class _Tokenizer:
    def encode(self, text, **options):
        return list(text.encode())


# Since 0.5.21 SGLang itself refuses seeds of numpy.
SEEDS_MAY_BE_NUMPY = "sampling_seed" not in inspect.getsource(SamplingParams.verify)
# Parameters that releases since 0.5.19 have.
NEW_FIELDS = {"beam_width", "ebnf_full_assistant", "watermark"}


def test_every_parameter_of_sglang_is_known():
    internal = ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len")
    names = {*SamplingParams.__struct_fields__} - {*internal, "is_normalized"}
    assert names - NEW_FIELDS == {*VALID_FIELDS, "regex", "ebnf", "structural_tag"}
    check_sampling({name: None for name in names - {"n"}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, np.int64(3)) for name in ("n", "max_new_tokens", "min_new_tokens", "top_k")],
        *[("sampling_seed", np.int32(-3))] * SEEDS_MAY_BE_NUMPY,
        ("temperature", np.float64(0.5)),
        ("temperature", np.float32(0.5)),
        ("top_p", np.float16(0.5)),
        ("ignore_eos", np.bool_(True)),
        ("ignore_eos", 1),
        ("stop", ("a", "b")),
        ("stop", {"a"}),
        ("stop_regex", ("a", r"\d")),
        ("stop_token_ids", {1, 2}),
        ("stop_token_ids", (1, 2)),
        ("stop_token_ids", frozenset({1})),
        ("stop_token_ids", [np.int64(1), np.int32(2)]),
        ("logit_bias", {3: 1.5}),
        ("logit_bias", {np.int64(3): np.float32(1.5)}),
    ],
)
def test_python_types_of_engine_users_pass(name, value):
    params = {name: value}
    check_raw(request(sampling_params=params), PAGES)
    assert params[name] is value
    SamplingParams(**params).verify(VOCAB)


@pytest.mark.parametrize("value", [np.int64(0), np.int64(-1)])
def test_integers_of_numpy_have_the_same_bounds(value):
    with pytest.raises(ValueError, match="n must be an integer of at least 1"):
        check_raw(request(sampling_params={"n": value}), PAGES)


VALID_REQUESTS = [
    {"text": "x"},
    {"text": ["x", "y"]},
    {"text": [""]},
    {"input_ids": [0, 1]},
    {"input_ids": [[0], [1, 2]]},
    {"input_embeds": [[0.5, 0.5]]},
    {"input_embeds": [[[0.5, 0.5]], [[0.5, 0.5]]]},
    {"text": "x", "sampling_params": None},
    {"text": ["x", "y"], "sampling_params": [{}, {"max_new_tokens": 3}]},
    {"text": ["x", "y"], "sampling_params": {"n": 2}, "return_logprob": True},
    {"text": ["x", "y"], "rid": ["a", "b"], "top_logprobs_num": [1, 2]},
    {"text": ["x", "y"], "logprob_start_len": [0, 1], "return_logprob": [True, False]},
    {"text": ["x", "y"], "extra_key": ["a", "b"], "bootstrap_room": [1, 2]},
    {"text": "x", "token_ids_logprob": [1, 2, 3]},
    {"text": ["x", "y"], "token_ids_logprob": [1, 2, 3]},
    {"text": ["x", "y"], "token_ids_logprob": [[1], [2, 3]]},
    {"text": "x", "session_params": {"id": "a", "rid": None, "offset": 3}},
    {"text": "x", "top_logprobs_num": -3, "return_logprob": True},
]


@pytest.mark.parametrize("fields", VALID_REQUESTS)
def test_valid_requests_pass_unchanged(fields):
    obj = GenerateReqInput(**copy.deepcopy(fields))
    check_raw(obj, PAGES)
    assert obj == GenerateReqInput(**fields)
    obj.normalize_batch_and_arguments()


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: [one], lambda one: [None, one]])
def test_overrides_of_engine_users_pass(wrap):
    override = PositionalEmbeds(embeds=[torch.zeros(4)], positions=[0])
    check_raw(request(positional_embed_overrides=wrap(override)), PAGES)


def test_requests_of_other_kinds_pass():
    check_raw(EmbeddingReqInput(text="x"), PAGES)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"return_logprob": True},
        {"return_logprob": True, "top_logprobs_num": VOCAB},
        {"return_logprob": True, "top_logprobs_num": -3},
        # Without return_logprob nothing is computed.
        {"top_logprobs_num": 100_000},
        {"priority": 2**63 - 1},
        {"priority": -5},
        {"priority": np.int64(5)},
    ],
)
@pytest.mark.parametrize("ids", [[0], [VOCAB - 1, 0], [np.int64(5)], None])
def test_tokens_of_the_vocabulary_pass(fields, ids):
    check_tokens(request(**fields), ids, VOCAB)


def test_vectors_need_no_token_ids():
    check_tokens(GenerateReqInput(input_embeds=[[0.5]]), [], VOCAB)
