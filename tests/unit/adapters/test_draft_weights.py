"""Copies of weights that only drafts use, and the inputs they are rounded for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models import utils

from kvspec_kernels.ops.attention_plan import Backend
from kvspec_kernels.reference import int4_weights
from kvspec_testkit.models.whole_layers import whole_layer_options
from sglang_kvspec.adapters import calibration_texts, draft_weights, weight_copies
from sglang_kvspec.adapters.calibration_texts import GrowingTexts
from sglang_kvspec.adapters.draft_weights import DraftForward, DraftWeights, make_draft_weights
from sglang_kvspec.adapters.self_calibration import (
    InputMoment,
    TextAttention,
    attend_to_whole_text,
    products_of,
    tf32_products,
)
from sglang_kvspec.adapters.weight_copies import KERNELS, REFERENCE, arithmetic_of
from sglang_kvspec.adapters.worker import KVSpecWorker
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError, UnsupportedError
from sglang_kvspec.runtime.ranks import Ranks

INPUTS, OUTPUTS = 100, 24
# SGLang pads the rows of a projection to a multiple of 64.
VOCABULARY = 70
WHOLE: dict[str, Any] = {"params_dtype": torch.float32, **whole_layer_options()}


@pytest.fixture
def model() -> torch.nn.Module:
    """Two linear layers, and others that have no copies."""
    torch.manual_seed(0)
    layers = [
        ColumnParallelLinear(INPUTS, INPUTS, bias=False, **WHOLE),
        ColumnParallelLinear(INPUTS, OUTPUTS, bias=True, **WHOLE),
        ReplicatedLinear(OUTPUTS, 2, params_dtype=torch.float32),
    ]
    for layer in layers:
        for part in layer.parameters():
            torch.nn.init.normal_(part)
    return torch.nn.Sequential(layers[0], torch.nn.LayerNorm(INPUTS), *layers[1:])


class Decoder(torch.nn.Module):
    """A linear layer between embeddings and the vocabulary projection, which may be one."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        options = {"params_dtype": torch.float32, "enable_tp": False}
        self.embed_tokens = VocabParallelEmbedding(VOCABULARY, INPUTS, **options)
        self.layer = ColumnParallelLinear(INPUTS, INPUTS, bias=False, **WHOLE)
        self.lm_head = self.embed_tokens
        if not is_tied:
            self.lm_head = ParallelLMHead(VOCABULARY, INPUTS, **options)
        for part in self.parameters():
            torch.nn.init.normal_(part)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up embeddings. VocabParallelEmbedding does so, but asks for the ranks."""
        found: torch.Tensor = self.embed_tokens.quant_method.embedding(self.embed_tokens, ids)
        return found

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        processor = SimpleNamespace(use_fp32_lm_head=False, rl_on_policy_target=None)
        found: torch.Tensor = LogitsProcessor._compute_lm_head(processor, x, self.lm_head)
        return found


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    torch.manual_seed(0)
    return Decoder(is_tied=request.param)


@pytest.fixture(params=[REFERENCE, KERNELS], ids=["reference", "kernels"])
def copies_of(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[torch.nn.Module], DraftWeights]:
    """Return a function that makes copies of a model's weights for independent inputs."""

    def moments(runner: Any, layers: list[Any], texts: torch.Tensor) -> list[torch.Tensor]:
        return [torch.eye(layer.weight.shape[1]) for layer in layers]

    monkeypatch.setattr(draft_weights, "write_texts", lambda *_: torch.zeros(1, 1))
    monkeypatch.setattr(draft_weights, "input_moments", moments)
    monkeypatch.setattr(draft_weights, "arithmetic_of", lambda device, kernels: request.param)

    def copies(model: torch.nn.Module) -> DraftWeights:
        if request.param is KERNELS:
            model.to(torch.bfloat16)
        return DraftWeights(SimpleNamespace(model=model), Ranks())

    return copies


@pytest.fixture
def weights(
    model: torch.nn.Module, copies_of: Callable[[torch.nn.Module], DraftWeights]
) -> DraftWeights:
    return copies_of(model)


def copy_of(layer: Any) -> torch.Tensor:
    return int4_weights.decode(int4_weights.round_to_nearest(layer.weight.detach()))


def inputs_of(model: Any) -> torch.Tensor:
    return torch.randn(3, INPUTS).to(model[0].weight.dtype)


def is_product(found: torch.Tensor, x: torch.Tensor, layer: Any) -> bool:
    """Return True if `found` is a product with the layer's copy. Its own weight is far from that:
    4 bits round by 2 % of a weight's range."""
    # Embeddings have none.
    own = getattr(layer, "bias", None)
    bias = 0 if own is None else own.float()
    expected = x.float() @ copy_of(layer).t() + bias
    # Kernels round copies and results to bf16, by up to 2^-9 each.
    limit = 1e-5 if x.dtype == torch.float32 else 2.0**-8
    return bool((found.float() - expected).norm() < limit * expected.norm())


def test_copies_are_used_in_force_only(model: Any, weights: DraftWeights) -> None:
    x, own = inputs_of(model), model[2].quant_method
    exact, _ = model[2](x)
    with weights.in_force():
        drafted, _ = model[2](x)
    assert is_product(drafted, x, model[2])
    assert not is_product(exact, x, model[2])
    assert model[2].quant_method is own
    assert torch.equal(model[2](x)[0], exact)


def test_drafts_get_logits_from_a_copy(
    decoder: Decoder, copies_of: Callable[[torch.nn.Module], DraftWeights]
) -> None:
    weights, ids = copies_of(decoder), torch.tensor([0, 5, VOCABULARY - 1])
    x = torch.randn(3, INPUTS).to(decoder.lm_head.weight.dtype)
    exact, embedded = decoder.logits(x), decoder.embed(ids)
    assert weights.has_projection
    for factor in (1, -2):
        weights.weights_will_change()
        with torch.no_grad():
            decoder.lm_head.weight.mul_(factor)
        weights.refresh()
        with weights.in_force():
            drafted = decoder.logits(x)
            assert torch.equal(decoder.embed(ids), embedded * (factor if is_tied(decoder) else 1))
            # Of a model whose norms are in fp32.
            assert torch.equal(decoder.logits(x.float()), drafted)
        assert drafted.dtype == exact.dtype
        assert drafted.shape == exact.shape
        assert is_product(drafted, x, decoder.lm_head)
        assert not is_product(exact * factor, x, decoder.lm_head)
        assert torch.equal(decoder.logits(x), exact * factor)


def is_tied(decoder: Decoder) -> bool:
    return decoder.lm_head is decoder.embed_tokens


def test_projections_that_cannot_be_copied_stay(decoder: Decoder) -> None:
    whole = draft_weights.copied_layers(decoder, is_checkpoint=False)
    assert whole == [decoder.layer, decoder.lm_head]
    # A checkpoint has no projection in 4 bits.
    assert draft_weights.copied_layers(decoder, is_checkpoint=True) == [decoder.layer]
    others: list[Any] = [torch.nn.Identity(), decoder.layer]
    for changes in ({"quant_method": SimpleNamespace()}, {"use_intel_amx_backend": True}):
        head = ParallelLMHead(VOCABULARY, INPUTS, enable_tp=False)
        for name, value in changes.items():
            setattr(head, name, value)
        others.append(head)
    for other in others:
        decoder.lm_head = other
        assert draft_weights.copied_layers(decoder, is_checkpoint=False) == [decoder.layer]
    # Two models in one, of which either may give the logits.
    both = torch.nn.ModuleList([Decoder(is_tied=False), Decoder(is_tied=False)])
    assert draft_weights.vocabulary_projection(both) is None


def test_a_draft_that_fails_leaves_the_models_own(model: Any, weights: DraftWeights) -> None:
    own = [model[0].quant_method, model[2].quant_method]
    with pytest.raises(RuntimeError, match="draft"), weights.in_force():
        raise RuntimeError("draft")
    assert [model[0].quant_method, model[2].quant_method] == own


def test_new_weights_are_copied_before_the_next_draft(model: Any, weights: DraftWeights) -> None:
    x = inputs_of(model)
    weights.refresh()
    assert weights.num_made == 1
    places = addresses(weights)
    weights.weights_will_change()
    with torch.no_grad():
        model[0].weight.mul_(-2)
    with pytest.raises(AssertionError, match="refresh"), weights.in_force():
        pass
    weights.refresh()
    with weights.in_force():
        drafted, _ = model[0](x)
    assert is_product(drafted, x, model[0])
    assert weights.num_made == 2
    assert addresses(weights) == places, "captured graphs hold the addresses"


@pytest.mark.parametrize("is_prefill", [True, False], ids=["prefill", "round"])
def test_copies_are_made_again_before_anything_runs(is_prefill: bool) -> None:
    """Replays of captured drafts do not ask for it."""
    done: list[str] = []

    def run(batch: Any) -> Any:
        done.append("run")
        return SimpleNamespace(new_seq_lens=None)

    worker = object.__new__(KVSpecWorker)
    worker.parts = SimpleNamespace(
        draft_weights=SimpleNamespace(refresh=lambda: done.append("refresh"))
    )
    worker._prefill, worker._run_round = SimpleNamespace(run=run), run
    worker._publish = lambda: None
    mode = SimpleNamespace(is_extend=lambda: is_prefill, is_idle=lambda: False)
    worker.forward_batch_generation(SimpleNamespace(forward_mode=mode))
    assert done == ["refresh", "run"]


def addresses(weights: DraftWeights) -> list[int]:
    return [part.data_ptr() for copy in weights._copies for part in copy._copy[:2]]


def test_forwards_of_drafts_use_the_copies(model: Any, weights: DraftWeights) -> None:
    x = inputs_of(model)
    forward = SimpleNamespace(run=lambda batch, rows, made: model[0](x)[0])
    logits = DraftForward(forward, weights).run(None, {})  # type: ignore[arg-type]
    assert is_product(logits, x, model[0])


def test_large_weights_are_rounded_in_blocks_of_rows(
    model: Any, weights: DraftWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [part.clone() for part in weights._copies[0]._copy[:2]]
    for part in weights._copies[0]._copy[:2]:
        part.zero_()
    monkeypatch.setattr(weight_copies, "WEIGHTS_AT_ONCE", 37 * 100)
    weights.weights_will_change()
    weights.refresh()
    assert all(map(torch.equal, weights._copies[0]._copy[:2], whole))


def test_the_log_says_how_long_each_stage_took(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0

    def takes(seconds: float, result: Callable[..., Any]) -> Callable[..., Any]:
        def stage(*args: Any) -> Any:
            nonlocal now
            now += seconds
            return result(*args)

        return stage

    def moments(runner: Any, layers: list[Any], texts: torch.Tensor) -> list[torch.Tensor]:
        return [torch.eye(layer.weight.shape[1]) for layer in layers]

    monkeypatch.setattr("time.perf_counter", lambda: now)
    # Each layer is a group of its own.
    monkeypatch.setattr(draft_weights, "CPU_MOMENT_BYTES", 1)
    monkeypatch.setattr(draft_weights, "write_texts", takes(7, lambda *_: torch.zeros(1, 1)))
    monkeypatch.setattr(draft_weights, "input_moments", takes(2, moments))
    monkeypatch.setattr(int4_weights, "compensation", takes(0.5, int4_weights.compensation))
    with caplog.at_level("INFO"):
        DraftWeights(SimpleNamespace(model=model), Ranks())
    assert "took 12.0 s, texts 7.0 s, inputs 4.0 s, rounding 1.0 s" in caplog.text


def test_rounding_multiplies_fp32_exactly(
    model: torch.nn.Module,
    copies_of: Callable[[torch.nn.Module], DraftWeights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also on a server with --enable-tf32-matmul."""
    is_allowed = []

    def compensation(moment: torch.Tensor) -> torch.Tensor:
        is_allowed.append(torch.backends.cuda.matmul.allow_tf32)
        return moment

    monkeypatch.setattr(int4_weights, "compensation", compensation)
    with tf32_products(True):
        copies_of(model)
        assert torch.backends.cuda.matmul.allow_tf32
    assert is_allowed == [False, False]


def test_sizes_are_reported(weights: DraftWeights, model: Any) -> None:
    none = {"kind": "target", "bytes": 0, "projection": False, "made": 0, "checkpoint": None}
    assert draft_weights.draft_weights_report(None) == none
    layers = [model[0], model[2]]
    if weights._copies[0].arithmetic is KERNELS:
        # Known before copies are made. 100 inputs are a chunk of 256, and 64 columns a tile.
        num_bytes = (INPUTS + OUTPUTS) * (128 + 4 * 4) + 4 * (2 + 1)
        assert draft_weights.copy_bytes(layers) == num_bytes
    else:
        # 100 inputs are two groups of 64.
        num_bytes = (INPUTS + OUTPUTS) * (64 + 2 * 4)
    some = none | {"kind": "int4", "bytes": num_bytes, "made": 1}
    assert draft_weights.draft_weights_report(weights) == some


@pytest.mark.parametrize(
    ("num_moments", "sizes"), [(0.5, [1, 1, 1]), (2, [2, 1]), (2.9, [2, 1]), (3, [3])]
)
def test_moments_take_up_to_their_budget(
    model: Any, monkeypatch: pytest.MonkeyPatch, num_moments: float, sizes: list[int]
) -> None:
    model.append(ColumnParallelLinear(INPUTS, OUTPUTS, bias=False, **WHOLE))
    torch.nn.init.normal_(model[-1].weight)
    layers, groups = [model[0], model[2], model[4]], []
    inputs = {layer: torch.randn(200, 5) @ torch.randn(5, INPUTS) for layer in layers}

    def moments(runner: Any, group: list[Any], texts: torch.Tensor) -> list[torch.Tensor]:
        groups.append(group)
        return [inputs[layer].t() @ inputs[layer] for layer in group]

    monkeypatch.setattr(draft_weights, "write_texts", lambda *_: torch.zeros(1, 1))
    monkeypatch.setattr(draft_weights, "input_moments", moments)
    monkeypatch.setattr(draft_weights, "CPU_MOMENT_BYTES", int(num_moments * 4 * INPUTS**2))
    weights = DraftWeights(SimpleNamespace(model=model), Ranks())
    assert [len(group) for group in groups] == sizes
    assert list(chain(*groups)) == layers
    for layer, x in inputs.items():
        # Each is rounded for inputs of its own.
        encoded = int4_weights.compensated(layer.weight.detach(), x.t() @ x)
        with weights.in_force():
            torch.testing.assert_close(layer(x)[0], int4_weights.product(x, encoded, layer.bias))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that says how many bytes of a GPU are free."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(draft_weights, "least_of_all_ranks", lambda value: value)

    def set_free(free_bytes: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 0))

    return set_free


def test_moments_take_what_a_gpu_has_free(model: Any, gpu: Callable[[int], None]) -> None:
    layers, device = [model[0], model[2]], torch.device("cuda")
    moment = 4 * INPUTS**2
    fixed = draft_weights.copy_bytes(layers) + 4 * moment + draft_weights.MARGIN_BYTES
    for left in (moment, 50 * moment):
        gpu(fixed + left)
        assert draft_weights._moment_budget(layers, device) == left
    gpu(fixed + moment - 1)
    with pytest.raises(ConfigError, match=r"draft-weights needs 2\.0 GiB .* 2\.0 GiB are free"):
        draft_weights._moment_budget(layers, device)


def test_models_without_such_layers_are_refused(model: Any) -> None:
    model.append(row := RowParallelLinear(INPUTS, OUTPUTS, **WHOLE))
    assert draft_weights.linear_layers(model) == [model[0], model[2], row]
    with pytest.raises(UnsupportedError, match="int4 cannot serve Sequential"):
        draft_weights.linear_layers(torch.nn.Sequential(model[1], model[3]))


def test_quantised_models_are_refused(model: Any) -> None:
    model[2].quant_method = SimpleNamespace()
    with pytest.raises(UnsupportedError, match="weights that are not quantised"):
        draft_weights.linear_layers(model)
    model[2].quant_method = model[0].quant_method
    model[2].use_intel_amx_backend = True
    with pytest.raises(UnsupportedError, match="AMX"):
        draft_weights.linear_layers(model)


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "null"),
        ({"draft_weights": "int4"}, "prefill"),
    ],
)
def test_servers_without_such_drafts_have_no_copies(options: dict[str, Any], mode: str) -> None:
    args = SimpleNamespace(disaggregation_mode=mode)
    assert make_draft_weights(KVSpecConfig(**options), args, None, Ranks()) is None


def test_inputs_are_summed(model: Any) -> None:
    layer, x = model[0], torch.randn(2, 5, INPUTS)
    measured = InputMoment(layer.quant_method, INPUTS, torch.device("cpu"))
    expected, _ = layer(x)
    with products_of([layer], [measured]):
        for part in x:
            layer(part)
        assert torch.equal(layer(x)[0], expected)
    rows = x.flatten(0, 1)
    torch.testing.assert_close(measured.moment, 2 * rows.t() @ rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tensor_cores_multiply_only_inputs_that_tf32_holds(dtype: torch.dtype) -> None:
    is_allowed = []
    moment = SimpleNamespace(
        addmm_=lambda *_: is_allowed.append(torch.backends.cuda.matmul.allow_tf32)
    )
    measured = InputMoment(SimpleNamespace(apply=lambda *_: None), 4, torch.device("cpu"))
    measured.moment = moment  # type: ignore[assignment]
    measured.apply(None, torch.ones(2, 4, dtype=dtype))
    assert is_allowed == [dtype != torch.float32]
    assert not torch.backends.cuda.matmul.allow_tf32


def test_texts_that_grow_attend_like_whole_ones() -> None:
    torch.manual_seed(0)
    num_texts, length, heads, kv_heads, size = 3, 7, 4, 2, 8
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=heads, tp_k_head_num=kv_heads, scaling=size**-0.5
    )
    q = torch.randn(num_texts, length, heads * size)
    k, v = torch.randn(2, num_texts, length, kv_heads, size)
    growing = GrowingTexts(num_texts, length)
    step_by_step, at_once = TextAttention(growing.attend), TextAttention(attend_to_whole_text)
    steps = []
    for place in range(length):
        growing.num_past = place
        steps.append(step_by_step.forward(q[:, place], k[:, place], v[:, place], layer, None))
    for text in range(num_texts):
        whole = at_once.forward(q[text], k[text], v[text], layer, None)
        torch.testing.assert_close(torch.stack([step[text] for step in steps]), whole)


def test_models_store_no_kv_while_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models of a GPU write KV themselves, into a pool of this dtype."""
    monkeypatch.setattr(utils, "_is_cuda", True)
    # SGLang asks the first up to 0.5.19, and the second since.
    for question in ("is_prefill_context_parallel_enabled", "is_cp_active"):
        if hasattr(utils, question):
            monkeypatch.setattr(utils, question, lambda *batch: False)
    attention = TextAttention(attend_to_whole_text)
    with forward_context(ForwardContext(attn_backend=attention)):
        assert not utils.enable_fused_set_kv_buffer(SimpleNamespace())
        monkeypatch.setattr(attention.token_to_kv_pool, "dtype", torch.bfloat16, raising=False)
        assert utils.enable_fused_set_kv_buffer(SimpleNamespace())


@pytest.mark.parametrize(("known", "first"), [(3, 3), (None, None), ([4, 5], None)])
def test_texts_begin_with_the_models_first_token(
    monkeypatch: pytest.MonkeyPatch, known: Any, first: int | None
) -> None:
    config = SimpleNamespace(bos_token_id=known)
    model_config = SimpleNamespace(vocab_size=10, hf_config=config)
    runner = SimpleNamespace(device="cpu", model_config=model_config)
    monkeypatch.setattr(calibration_texts, "decode_batch", lambda runner, ids, positions: ids)
    # The next token is one more than the last.
    monkeypatch.setattr(
        calibration_texts,
        "run_model",
        lambda runner, ids: torch.nn.functional.one_hot((ids + 1) % 10, 10) * 1e4,
    )
    texts = calibration_texts.write_texts(runner, Ranks(), 4, 6)
    assert texts.shape == (4, 6)
    if first is not None:
        assert bool((texts[:, 0] == first).all())
    assert bool(((texts[:, 1:-1] + 1) % 10 == texts[:, 2:]).all())
    assert torch.equal(texts, calibration_texts.write_texts(runner, Ranks(), 4, 6))


@pytest.mark.parametrize(("kernels", "backend"), [("triton", "triton"), ("cuda", None)])
def test_copies_take_triton_where_it_is_asked_for(kernels: Backend, backend: str | None) -> None:
    """Many rows have no CUDA kernel, so `cuda` does not rule Triton out."""
    product = arithmetic_of(torch.device("cuda"), kernels).product
    assert getattr(product, "keywords", {}).get("backend") == backend
    assert backend or product is KERNELS.product
