"""The device and the back ends that kernel tests run on.

Without a CUDA device the kernels run in Triton's interpreter. An environment variable selects the
interpreter when triton is imported (tests/unit/conftest.py), and is set for each test of this
folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvspec_kernels.ops.attention import (
    DraftAttention,
    VerifyAttention,
    workspace_nbytes,
)
from kvspec_kernels.ops.attention_plan import Arithmetic, AttentionPlan
from kvspec_kernels.ops.cuda_attention import CudaAttention
from kvspec_testkit.kernels.cases import (
    POISON_BYTE,
    AttentionCase,
    results_for,
)
from kvspec_testkit.kernels.comparison import assert_attention
from kvspec_testkit.kernels.interpreter import patch_interpreter

FOLDER = Path(__file__).parent
HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    patch_interpreter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif item.path.parent == FOLDER:
            # The interpreter turns arrays of one element into loop bounds.
            item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array"))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_CUDA:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda:0" if HAS_CUDA else "cpu")


# Back ends, with the arithmetic of drafts where there is a choice.
BACKENDS = ("triton", "cuda-fp16", "cuda-int8") if HAS_CUDA else ("triton",)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=("triton", "cuda") if HAS_CUDA else ("triton",))
def encoder(request: pytest.FixtureRequest) -> str:
    """Back end of `encode_pages`."""
    return request.param


def plan_of(case: AttentionCase, arithmetic: Arithmetic) -> AttentionPlan:
    """Return the plan that the wrappers would make for a case."""
    verify = case.source != "anchor"
    return AttentionPlan(
        indptr=case.indptr,
        indices=case.indices,
        last_page_len=case.last_page_len,
        qo_indptr=case.qo_indptr if verify else None,
        num_qo_heads=case.q.shape[1],
        num_kv_heads=case.num_kv_heads,
        head_dim=case.q.shape[2],
        page_size=case.page_size,
        settings=case.settings,
        source=case.source,
        q_dtype=case.q.dtype,
        sm_scale=1.0,
        max_qo_len=max(1, *case.qo_indptr.diff().tolist()),
        num_sms=1,
        arithmetic=arithmetic,
    )


Run = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.fixture
def prepare(backend: str, device: torch.device) -> Callable[..., Run]:
    """Return a function that plans a case on the wrapper for its source, and returns a function
    that computes (out, lse), any number of times. Without a given workspace, its memory starts as
    NaN."""

    def prepared(case: AttentionCase, **options: object) -> Run:
        verify = case.source != "anchor"
        q_lens = case.qo_indptr.diff().tolist()
        sizes = {
            "num_qo_heads": case.q.shape[1],
            "num_kv_heads": case.num_kv_heads,
            "head_dim": case.q.shape[2],
            "page_size": case.page_size,
            "settings": case.settings,
            "num_sms": options.pop("num_sms", None),
        }
        max_qo_len = {"max_qo_len": max(1, *q_lens)}
        name, _, arithmetic = backend.partition("-")
        if verify and arithmetic == "int8":
            pytest.skip("verifying is in fp16")
        if not verify:
            sizes["arithmetic"] = arithmetic or "auto"
        plan = plan_of(case, sizes.get("arithmetic", "auto"))
        if name == "cuda" and not CudaAttention.covers(plan):
            pytest.skip("not a case of the CUDA back end")
        nbytes = workspace_nbytes(
            batch_size=len(q_lens),
            q_dtype=case.q.dtype,
            source=case.source,
            device=device,
            backend=name,
            deterministic_pages=options.get("deterministic_pages"),
            **sizes,
            **max_qo_len,
        )
        memory = options.pop("workspace", None)
        if memory is None:
            memory = torch.full((nbytes,), POISON_BYTE, dtype=torch.uint8, device=device)
        attention = (VerifyAttention if verify else DraftAttention)(memory, name)
        if verify:
            options |= {"qo_indptr": case.qo_indptr, "target": case.source, **max_qo_len}
        else:
            # All requests of a draft have equally many query tokens.
            options["num_rows"] = max(1, *q_lens)
        attention.plan(
            indptr=case.indptr,
            indices=case.indices,
            last_page_len=case.last_page_len,
            q_dtype=case.q.dtype,
            **sizes,
            **options,
        )
        records = (case.anchors, case.residuals, case.residual_slots)
        given = records if verify else records[:1]
        return lambda out, lse: attention.run(case.q, *given, tail=case.tail, out=out, lse=lse)

    return prepared


@pytest.fixture
def check(prepare: Callable[..., Run], backend: str) -> Callable[..., None]:
    """Return a function that runs a case into results of NaN, and compares them with the
    reference."""
    # 12-bit integers are coarser than fp16, so the baseline is bf16 for fp16 models, too.
    baseline = torch.bfloat16 if backend == "cuda-int8" else None
    cuda = backend.startswith("cuda")

    def check_case(case: AttentionCase, **options: object) -> None:
        out, lse = results_for(case)
        prepare(case, **options)(out, lse)
        # The CUDA kernel for verifications sums probabilities in fp16, the precision in which it
        # multiplies them.
        weights = torch.float16 if cuda and case.source == "int8" else torch.float32
        assert_attention(
            case, out, lse, sm_scale=options.get("sm_scale"), baseline=baseline, weights=weights
        )

    return check_case
