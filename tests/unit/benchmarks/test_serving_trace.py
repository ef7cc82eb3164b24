"""The evaluation of a trace by bench_profile.py: kernels by category, rounds, busy and idle
time."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from serving.kernel_names import category_of, short_name
from serving.trace import TraceError, busy_us, gaps, gpu_events, read_trace
from serving.trace_rounds import Phase, steady_rounds

EXACT_VERIFY = "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<2u>>"
MATRIX = "nvjet_sm90_tst_128x16_64x11_2x1_v_bz_TNT"
ARGMAX = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
    "at::native::ArgMaxOps<float>, unsigned int, long, 4, 4> >(at::native::ReduceOp<float>)"
)
STORE = (
    "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<"
    "at::native::index_put_kernel_impl<at::native::OpaqueType<2> >(at::TensorIterator&)>"
)

# Names that torch's profiler wrote on an H200.
NAMES = {
    "draft_attention": "attention",
    "verify_attention": "attention",
    "attention_kernel": "attention",
    EXACT_VERIFY: "attention",
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::Pos)0>": "attention",
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<int>>>": "attention",
    "merge_kernel": "merge",
    "draft_join": "merge",
    "verify_join": "merge",
    "argmax_kernel": "sampling",
    "end_step_kernel": "sampling",
    "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u>": "merge",
    "void flashinfer::MergeStateKernel<8u, __nv_bfloat16>": "merge",
    MATRIX: "matrix products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": "matrix products",
    "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>": "norm, rope, activation",
    "void (anonymous namespace)::fused_rope_kernel<true, 128l>": "norm, rope, activation",
    "void (anonymous namespace)::act_and_mul_kernel<__nv_bfloat16>": "norm, rope, activation",
    "encode_pages": "encode, append",
    "append_kernel": "encode, append",
    STORE: "encode, append",
    ARGMAX: "sampling",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "all-reduce",
    "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>": "all-reduce",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)": "copies, gathers",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(int)>": (
        "copies, gathers"
    ),
    "memcpy32_post": "copies, gathers",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<int>>": "other",
    "write_req_to_token_pool_triton": "other",
}


@pytest.mark.parametrize("name", NAMES)
def test_category_of_a_kernel(name):
    assert category_of(name) == NAMES[name]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (EXACT_VERIFY, "BatchPrefillWithPagedKVCacheKernel"),
        ("void (anonymous namespace)::act_and_mul_kernel<__nv_bfloat16>(x)", "act_and_mul_kernel"),
        (STORE, "index_elementwise_kernel [index_put]"),
        (ARGMAX, "reduce_kernel [ArgMaxOps]"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
        (MATRIX, MATRIX),
    ],
)
def test_short_names_distinguish_kernels(name, short):
    assert short_name(name) == short


class Trace:
    """A trace written event by event. Each event begins where the last one ended, unless told
    otherwise."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 1000.0
        self.correlation = 0

    def add(self, name: str, us: float, *, gap: float = 0.0, kind: str = "kernel") -> None:
        self.now += gap
        args = {"correlation": self.correlation, "stream": 7}
        self.events.append(
            {"ph": "X", "cat": kind, "name": name, "ts": self.now, "dur": us, "args": args}
        )
        self.now += us

    def launch(self, name: str) -> None:
        """Attribute the following events to this call on the CPU."""
        self.correlation += 1
        args = {"correlation": self.correlation}
        self.events.append(
            {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": 1.0, "dur": 1.0, "args": args}
        )

    def draft_step(self, gap: float = 0.0) -> None:
        """Add a step of 110 us, after a gap."""
        self.launch("cudaGraphLaunch")
        self.add(MATRIX, 70, gap=gap)
        self.add("draft_attention", 30)
        self.add(ARGMAX, 10)

    def verification(self, attention: str = EXACT_VERIFY, graph: bool = False) -> None:
        """Add a verification of 300 us, with 50 us in which nothing runs."""
        self.launch("cudaGraphLaunch" if graph else "cudaLaunchKernel")
        self.add("Memcpy HtoD (Pinned -> Device)", 5, gap=40, kind="gpu_memcpy")
        self.add(MATRIX, 195)
        self.add(attention, 90)
        self.add("a_kernel_of_its_own_kind", 10, gap=10)

    def round(self, steps: int, **verification: Any) -> None:
        for _ in range(steps):
            self.draft_step(gap=1)
        self.verification(**verification)


def test_rounds_are_distinguished_and_drafts_from_verification():
    trace = Trace()
    for steps in (1, 4, 2, 3):
        trace.round(steps)
    found = steady_rounds(gpu_events(trace.events), drafting=True)
    # The first round starts the profiler, and the last one lacks the gap before a next round.
    assert [len(round.steps) for round in found] == [4, 2]
    first = found[0]
    assert first.step_us == pytest.approx((4 * 110 + 3) / 4)
    assert first.busy_us(Phase.STEPS) == pytest.approx(440)
    assert first.idle_us(Phase.STEPS) == pytest.approx(3)
    assert first.busy_us(Phase.REST) == pytest.approx(300)
    # Idle time includes the gap before the next round's first step.
    assert first.idle_us(Phase.REST) == pytest.approx(51)
    assert first.us == pytest.approx(443 + 351)
    assert first.category_us() == pytest.approx(
        {
            (Phase.STEPS, "matrix products"): 280,
            (Phase.STEPS, "attention"): 120,
            (Phase.STEPS, "sampling"): 40,
            (Phase.REST, "copies, gathers"): 5,
            (Phase.REST, "matrix products"): 195,
            (Phase.REST, "attention"): 90,
            (Phase.REST, "other"): 10,
        }
    )
    assert [(gap.after, gap.before) for gap in first.gaps(Phase.REST)] == [
        (ARGMAX, "Memcpy HtoD (Pinned -> Device)"),
        (EXACT_VERIFY, "a_kernel_of_its_own_kind"),
        ("a_kernel_of_its_own_kind", "the next round"),
    ]
    assert first.kernels_us(Phase.REST, "other") == {"a_kernel_of_its_own_kind": 10}


def test_a_verification_from_a_graph_is_no_draft_step():
    trace = Trace()
    for _ in range(4):
        trace.round(3, attention="verify_attention", graph=True)
    found = steady_rounds(gpu_events(trace.events), drafting=True)
    assert [len(round.steps) for round in found] == [3, 3]
    assert found[0].category_us()[Phase.REST, "attention"] == pytest.approx(90)


def test_a_copy_between_draft_steps_begins_no_round():
    trace = Trace()
    for _ in range(4):
        trace.draft_step()
        trace.launch("cudaMemcpyAsync")
        trace.add("Memcpy DtoH (Device -> Pinned)", 2, kind="gpu_memcpy")
        trace.round(1)
    found = steady_rounds(gpu_events(trace.events), drafting=True)
    assert [len(round.steps) for round in found] == [2, 2]


def test_steps_of_plain_sglang():
    trace = Trace()
    for _ in range(5):
        trace.launch("cudaGraphLaunch")
        trace.add(MATRIX, 60)
        trace.add("void flashinfer::BatchPrefillWithPagedKVCacheKernel<1>", 40)
        trace.launch("cudaLaunchKernel")
        trace.add(ARGMAX, 5, gap=3)
    found = steady_rounds(gpu_events(trace.events), drafting=False)
    assert [len(step.steps) for step in found] == [1, 1, 1]
    assert found[0].us == pytest.approx(108)
    assert found[0].category_us()[Phase.REST, "sampling"] == pytest.approx(5)


def test_kernels_at_the_same_time_are_busy_once():
    trace = Trace()
    trace.add(MATRIX, 10)
    trace.add(MATRIX, 10, gap=-4)
    trace.add(MATRIX, 2, gap=-7)
    trace.add("encode_pages", 3, gap=9)
    events = gpu_events(trace.events)
    assert busy_us(events, 1000, 1030) == pytest.approx(19)
    assert busy_us(events, 1005, 1021) == pytest.approx(12)
    found = gaps(events, 1000, 1030, "the end")
    assert [(gap.us, gap.after, gap.before) for gap in found] == [
        (pytest.approx(4), MATRIX, "encode_pages"),
        (pytest.approx(7), "encode_pages", "the end"),
    ]


def test_events_are_ordered_by_begin():
    trace = Trace()
    trace.add(MATRIX, 10)
    trace.add("encode_pages", 3)
    names = [event.name for event in gpu_events(reversed(trace.events))]
    assert names == [MATRIX, "encode_pages"]


def test_a_trace_without_a_gpu_says_so():
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "args": {}}
    with pytest.raises(TraceError, match="no GPU activity: no kernel, only 2 operations"):
        gpu_events([event, event])


def test_a_trace_without_graphs_says_so():
    trace = Trace()
    trace.verification()
    with pytest.raises(TraceError, match="no draft step: no CUDA graph was replayed"):
        steady_rounds(gpu_events(trace.events), drafting=True)


def test_too_few_rounds():
    trace = Trace()
    trace.round(2)
    trace.round(2)
    with pytest.raises(TraceError, match="the trace has 2 rounds, at least 3"):
        steady_rounds(gpu_events(trace.events), drafting=True)


def test_files(tmp_path):
    trace = Trace()
    trace.add(MATRIX, 10)
    whole, cut = tmp_path / "whole.trace.json.gz", tmp_path / "cut.trace.json.gz"
    whole.write_bytes(gzip.compress(json.dumps({"traceEvents": trace.events}).encode()))
    cut.write_bytes(whole.read_bytes()[:-20])
    assert [event.us for event in read_trace(whole)] == [10]
    with pytest.raises(TraceError, match=r"cut\.trace\.json\.gz is not a readable trace"):
        read_trace(cut)
