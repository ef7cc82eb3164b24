"""SGLang's ServerArgs for a KVSpecConfig, and the start-up checks of flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvspec_kernels.codecs.coverage import EXACT_IN_ORDER
from sglang_kvspec.adapters import activation
from sglang_kvspec.adapters.flags import flag_values, is_ours, parse_config
from sglang_kvspec.adapters.gpus import check_gpus
from sglang_kvspec.adapters.prefix_flags import (
    PREFIX_CACHE,
    check_plain_prefix_cache,
    check_prefix_tiers,
)
from sglang_kvspec.adapters.size_flags import check_sizes
from sglang_kvspec.adapters.target_choice import (
    DETERMINISTIC,
    load_target_attention,
    target_attention_name,
)
from sglang_kvspec.adapters.transfer_flags import check_plain_transfer, check_transfer_flags
from sglang_kvspec.codecs.registry import tried_on_gpu
from sglang_kvspec.core.codec_names import UNTRIED_ON_GPU
from sglang_kvspec.core.config import DEFAULT_PAGE_SIZE, KVSpecConfig
from sglang_kvspec.core.errors import ConfigError, UnsupportedError
from sglang_kvspec.core.flag_needs import Server, stores_or_sends_residuals
from sglang_kvspec.core.flags import FLAGS
from sglang_kvspec.core.units import GIB

ATTENTION_BACKEND = "kvspec"

# SGLang's own default for speculative decoding. The size of the recent window depends on it.
DEFAULT_MAX_RUNNING_REQUESTS = 48

# field: (value that is fine, why any other is refused)
_REFUSED: dict[str, tuple[Any, str]] = {
    "enable_hierarchical_cache": (False, "KVSpec has its own host tier"),
    "enable_mixed_chunk": (False, "SGLang cannot mix prefill into speculative batches"),
    "kv_cache_dtype": ("auto", "KVSpec encodes the KV cache itself"),
    "disaggregation_decode_enable_radix_cache": (False, "KVSpec's decode servers keep no prefixes"),
    "disaggregation_decode_enable_offload_kvcache": (False, "KVSpec has its own tiers"),
    "disaggregation_decode_allocation_policy": ("early", "KVSpec sends pages during the prefill"),
    "disaggregation_enable_kv_checksum": (False, "KVSpec's transfers have their own checksums"),
    "enable_pd_role_switch": (False, "KVSpec's servers keep their role"),
    "enable_lora": (None, "KVSpec does not serve LoRA adapters yet"),
    "lora_paths": (None, "KVSpec does not serve LoRA adapters yet"),
    "pp_size": (1, "KVSpec does not support pipeline parallelism yet"),
    "enable_dp_attention": (False, "KVSpec does not support data-parallel attention yet"),
    "attn_dp_size": (1, "KVSpec does not support data-parallel attention yet"),
    "dcp_size": (1, "KVSpec does not support context parallelism yet"),
    "attn_cp_size": (1, "KVSpec does not support context parallelism yet"),
    "enable_prefill_context_parallel": (False, "KVSpec does not support context parallelism yet"),
    "enable_session_radix_cache": (False, "KVSpec's prefix cache has no sessions"),
    "enable_streaming_session": (False, "a streaming session keeps partial pages between turns"),
    "enable_lmcache": (False, "KVSpec has its own tiers"),
    "enable_flexkv": (False, "KVSpec has its own tiers"),
    "enable_unified_cache_external_linker": (False, "KVSpec has its own tiers"),
    "enable_unified_memory": (False, "KVSpec has its own KV pool"),
    "enable_kv_cache_sharding": (False, "KVSpec has its own KV pool"),
    "enable_return_routed_experts": (False, "KVSpec does not track the KV slot of each token"),
    "enable_hisparse": (False, "KVSpec has its own tiers"),
    "enable_layernorm_sp": (False, "KVSpec builds its own ragged batches"),
    "enable_two_batch_overlap": (False, "KVSpec builds its own ragged batches"),
    "enable_memory_saver": (False, "KVSpec cannot release and restore its pools yet"),
    "enable_page_major_kv_layout": (False, "KVSpec has its own KV layout"),
    "is_embedding": (False, "KVSpec serves generation only"),
    "enable_watermark": (False, "KVSpec samples tokens itself, without watermarks"),
    "enable_return_aux_hidden_states": (False, "KVSpec does not return hidden states yet"),
    "enable_nvidia_megakernel": (False, "KVSpec runs its own forwards and graphs"),
    "enable_amd_monokernel": (False, "KVSpec runs its own forwards and graphs"),
    "cuda_graph_config": (None, "KVSpec captures its own graphs"),
    "cuda_graph_backend_decode": ("disabled", "KVSpec captures its own graphs"),
    "cuda_graph_backend_prefill": ("disabled", "KVSpec captures its own graphs"),
    "enable_paged_experts": (False, "KVSpec captures CUDA graphs with all experts in GPU memory"),
    "rl_on_policy_target": (None, "KVSpec does not reproduce a trainer's kernels"),
    "dllm_algorithm": (None, "KVSpec verifies tokens from left to right"),
    "speculative_num_draft_tokens": (None, "--kvspec-draft-len sets the number of drafts"),
    "speculative_num_steps": (None, "--kvspec-draft-len sets the number of drafts"),
    "speculative_use_block_verification": (False, "KVSpec accepts drafts by its own rules"),
    "speculative_eagle_topk": (None, "KVSpec drafts one sequence, not a tree"),
    "tokenizer_worker_num": (1, "SGLang's additional HTTP workers load no plugins"),
    "detokenizer_worker_num": (1, "more detokenizers need more tokenizer workers"),
    "grpc_mode": (False, "requests over gRPC bypass KVSpec's checks"),
    "smg_grpc_mode": (False, "requests over gRPC bypass KVSpec's checks"),
    "use_ray": (False, "SGLang's Ray actors load no plugins"),
    "encoder_only": (False, "KVSpec serves generation only"),
}
_GRAMMAR_BACKENDS = (None, "xgrammar", "none")


def build_server_args(make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return the ServerArgs that `make` builds of its own fields, with the configuration of the
    kvspec flags among `arguments`.

    Switches KVSpec on or off for this process and those it spawns. Raises ConfigError or
    UnsupportedError before any weight is read.
    """
    values = flag_values(arguments)
    kwargs = {name: value for name, value in arguments.items() if not is_ours(name)}
    config = parse_config(values)
    if config is None:
        if str(kwargs.get("speculative_algorithm")).upper() == activation.ALGORITHM_NAME:
            raise ConfigError("--speculative-algorithm KVSPEC cannot be set: use --kvspec")
        check_plain_transfer(kwargs)
        check_plain_prefix_cache(kwargs)
        activation.switch_off()
        return make(**kwargs | _default_device(kwargs))
    if config.arithmetic == "deterministic":
        kwargs["enable_deterministic_inference"] = True
    check_flags(config, kwargs)
    on_gpu = not activation.cpu_platform_is_active()
    activation.check_sglang_version(on_gpu=on_gpu)
    if on_gpu:
        check_gpu_flags(config, kwargs)
    else:
        check_cpu_flags(config, kwargs)
    # Imported late: a plain server loads neither codecs nor checks.
    from sglang_kvspec.adapters.compressor_choice import with_compressor
    from sglang_kvspec.adapters.model_check import check_model, model_config_of
    from sglang_kvspec.adapters.residual_choice import with_residual_form
    from sglang_kvspec.adapters.weights_choice import with_weights

    fields = kwargs | _implied(config, kwargs)
    model = model_config_of(fields)
    config = with_compressor(config, on_gpu=on_gpu)
    config = with_residual_form(config, fields, model, on_gpu=on_gpu)
    check_model(
        config,
        model,
        fields["page_size"],
        on_gpu=on_gpu,
        num_ranks=fields.get("tp_size") or 1,
        deterministic=bool(fields.get("enable_deterministic_inference")),
    )
    config = with_weights(config, fields, model, on_gpu=on_gpu)
    activation.switch_on(config)
    server_args = make(**fields)
    server_args._kvspec = config
    return server_args


def check_flags(config: KVSpecConfig, kwargs: dict[str, Any]) -> None:
    """Raise ConfigError for SGLang options KVSpec cannot honour: flag, value and reason."""
    # Imported late: plain servers do not check flags.
    from sglang_kvspec.adapters.compat.host_receive import host_receive_off

    threshold = "disaggregation_decode_host_receive_threshold"
    refused = _REFUSED | {threshold: (host_receive_off(), "KVSpec has its own tiers")}
    for name, (fine, reason) in refused.items():
        value = kwargs.get(name, fine)
        if value != fine and value is not None and value is not False:
            raise ConfigError(
                f"{_flag(name)} {value} cannot be combined with --kvspec (allowed: "
                f"{'leave it unset' if fine in (None, False) else fine}): {reason}"
            )
    for name, allowed in (
        ("speculative_algorithm", (None,)),
        ("attention_backend", (None, ATTENTION_BACKEND)),
        ("prefill_attention_backend", (None,)),
        ("decode_attention_backend", (None,)),
        ("speculative_draft_model_path", (None,)),
        # A host pool of SGLang could not read KVSpec's pages.
        ("disaggregation_decode_retraction_backup", (None, "cpu_tensor")),
        ("grammar_backend", _GRAMMAR_BACKENDS),
        # A cache of another plugin would move pages that only KVSpec's pool can read.
        ("radix_cache_backend", (None, PREFIX_CACHE)),
    ):
        value = kwargs.get(name)
        if value not in allowed:
            choices = ", ".join(str(choice) for choice in allowed if choice) or "leave it unset"
            raise ConfigError(
                f"{_flag(name)} {value} cannot be combined with --kvspec (allowed: {choices})"
            )
    _check_environment()
    from sglang_kvspec.codecs.registry import check_page_size

    page_size = _page_size(kwargs)
    check_page_size(page_size)
    check_sizes(config, kwargs, page_size)
    _check_needs(config, kwargs, on_gpu=False)
    check_transfer_flags(config, kwargs)
    check_prefix_tiers(config)


def _check_needs(config: KVSpecConfig, kwargs: dict[str, Any], *, on_gpu: bool) -> None:
    import psutil

    server = Server(kwargs, memory_gib=psutil.virtual_memory().total / GIB)
    for flag in FLAGS:
        flag.check_server(config, server, on_gpu=on_gpu)


def _check_environment() -> None:
    """Raise ConfigError for environment variables that KVSpec cannot honour or understand."""
    from sglang_kvspec.adapters.compat.rust_server import rust_server_is_on

    if rust_server_is_on():
        raise ConfigError(
            "SGLANG_RUST_SERVER=1 cannot be combined with --kvspec (allowed: leave it unset): "
            "requests to SGLang's Rust server bypass KVSpec's checks"
        )
    activation.debug_mode()


def check_cpu_flags(config: KVSpecConfig, kwargs: dict[str, Any]) -> None:
    """Raise UnsupportedError for flags that only a GPU supports."""
    if config.target_attention is not None:
        raise UnsupportedError(
            f"--kvspec-target-attention {config.target_attention} needs a GPU (on a CPU leave it "
            "unset): on a CPU, attention runs in plain torch"
        )
    if config.kernels != "auto":
        raise UnsupportedError(
            f"--kvspec-kernels {config.kernels} needs a GPU (on a CPU leave it unset): on a CPU, "
            "everything runs in plain torch"
        )
    server = Server(kwargs, memory_gib=0)
    packs = config.exact_residual == "packed"
    if packs and not stores_or_sends_residuals(config, server):
        raise UnsupportedError(
            "--kvspec-exact-residual packed has no effect on residuals in the memory of a CPU "
            "server (allowed: raw, or packed with a prefix tier or a split transfer)"
        )
    if kwargs.get("enable_deterministic_inference"):
        asked = _asked_for_determinism(config)
        raise UnsupportedError(
            f"{asked} needs a GPU with --kvspec (on a CPU leave it unset): SGLang's "
            "batch-invariant kernels need Triton"
        )
    if kwargs.get("quantization") is not None:
        raise UnsupportedError(
            f"--quantization {kwargs['quantization']} needs a GPU with --kvspec (on a CPU leave it "
            "unset): SGLang's kernels for quantised weights run on GPUs only"
        )


def check_gpu_flags(config: KVSpecConfig, kwargs: dict[str, Any]) -> None:
    """Raise UnsupportedError for a GPU on which KVSpec does not run, and for flags that KVSpec does
    not support on a GPU. Raises ConfigError as load_target_attention()."""
    check_gpus(config.kernels)
    _check_needs(config, kwargs, on_gpu=True)
    if config.codec in UNTRIED_ON_GPU:
        activation.check_untested(f"--kvspec-codec {config.codec}", ", ".join(tried_on_gpu()))
    if config.exact_residual == "packed":
        for what, is_asked in (
            ("keep_anchors=false", config.frees_anchors),
            ("--kvspec-prefix-server", config.prefix_server is not None),
        ):
            if is_asked:
                activation.check_untested(f"--kvspec-exact-residual packed with {what}", "raw")
    deterministic = bool(kwargs.get("enable_deterministic_inference"))
    if config.target_attention is not None:
        load_target_attention(config, deterministic=deterministic)
    name = target_attention_name(config, deterministic=deterministic)
    page_size = _page_size(kwargs)
    if name == DETERMINISTIC["exact"] and page_size not in EXACT_IN_ORDER.page_sizes:
        asked = f"--kvspec-target-attention {config.target_attention}"
        if config.target_attention is None:
            asked = _asked_for_determinism(config)
        raise UnsupportedError(
            f"--page-size {page_size} cannot be combined with {asked} (allowed: powers of two)"
        )


def _asked_for_determinism(config: KVSpecConfig) -> str:
    """Return the flag that turned deterministic inference on."""
    if config.arithmetic == "deterministic":
        return f"--kvspec-arithmetic {config.arithmetic}"
    return "--enable-deterministic-inference"


def _page_size(kwargs: dict[str, Any]) -> int:
    asked = kwargs.get("page_size")
    return DEFAULT_PAGE_SIZE if asked is None else int(asked)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _default_device(kwargs: dict[str, Any]) -> dict[str, str]:
    """Return the device of a server that names none, if this package has to choose it: SGLang has
    no default for the platform of a plug-in."""
    if kwargs.get("device") or not activation.cpu_platform_is_active():
        return {}
    return {"device": "cpu"}


def _implied(config: KVSpecConfig, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the ServerArgs fields that follow from --kvspec."""
    on_gpu = not activation.cpu_platform_is_active()
    offloads_on_gpu = config.host_gb and on_gpu
    # Without prefix tiers, a GPU uses SGLang's own prefix cache.
    prefix_cache = None if on_gpu and not config.keeps_prefixes else PREFIX_CACHE
    return {
        **_default_device(kwargs),
        "speculative_algorithm": activation.ALGORITHM_NAME,
        "speculative_num_draft_tokens": config.max_draft_len + 1,
        "speculative_num_steps": max(config.max_draft_len, 1),
        "speculative_eagle_topk": 1,
        "attention_backend": ATTENTION_BACKEND,
        "page_size": _page_size(kwargs),
        "max_running_requests": kwargs.get("max_running_requests") or DEFAULT_MAX_RUNNING_REQUESTS,
        "grammar_backend": kwargs.get("grammar_backend") or "xgrammar",
        "radix_cache_backend": kwargs.get("radix_cache_backend") or prefix_cache,
        # See the needs of --kvspec-host-gb.
        "prefill_max_requests": 1 if offloads_on_gpu else kwargs.get("prefill_max_requests"),
        # SGLang's overlap has nothing to gain: a CPU computes where it schedules, and on a GPU an
        # iteration is a round of many steps.
        "disable_overlap_schedule": True,
        # KVSpec captures graphs of its own.
        "disable_decode_cuda_graph": True,
        "disable_prefill_cuda_graph": True,
        # The autotuner's dummy forwards have no planned rows.
        "disable_flashinfer_autotune": True,
    }
