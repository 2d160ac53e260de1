"""What the GPU benchmarks conclude from what they measured: made-up measurements in, known answers out. Needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_manager  # noqa: E402
import gpu_multi  # noqa: E402
import gpu_overlap  # noqa: E402
import gpu_report  # noqa: E402
import gpu_step  # noqa: E402
import gpu_timeline as lines  # noqa: E402

NCCL = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def event(cat: str, name: str, stream: int, start: float, end: float) -> dict[str, Any]:
    args = {"stream": stream, "correlation": 1}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": args}


def three_layers() -> list[lines.Activity]:
    """One micro-step: layers 2, 1, 0 compute for 100 us each; each is reduced from 10 us after its end, for 50 us."""
    events = [{"ph": "M", "name": "process_name"}, event("cuda_runtime", "cudaLaunchKernel", 0, 0, 1)]
    for at in (1000, 1100, 1200, 1300, 1400):
        events.append(event("kernel", SPIN, 7, at, at + 1))
    for at in (1101, 1201, 1301):
        events.append(event("kernel", "gemm", 7, at, at + 99))
    for at in (1210, 1310, 1410):
        events.append(event("kernel", NCCL, 20, at, at + 50))
    events.append(event("gpu_memset", "Memset (Device)", 7, 1101, 1102))
    return lines.activities({"traceEvents": events})


TRACE = [
    *(("reduce_scatter", f"block 'decoder' layer {layer}", 100, 0) for layer in (2, 1, 0)),
    ("end_step", "model", 0, 0),
]


def test_the_timeline_of_a_step() -> None:
    result = lines.timeline(three_layers(), TRACE, layers=3, micro_steps=1)
    assert result.compute == [{2: (100.0, 200.0), 1: (200.0, 300.0), 0: (300.0, 400.0)}]
    assert [(e.unit[-1], e.start, e.end) for e in result.exchanges] == [
        ("2", 210.0, 260.0),
        ("1", 310.0, 360.0),
        ("0", 410.0, 460.0),
    ]
    assert [e.covered for e in result.exchanges] == [1.0, 1.0, 0.0]
    assert (result.behind, result.blocks) == (2, 2)
    assert result.overlapped == pytest.approx(2 / 3)
    assert result.exposed_us == pytest.approx(50)
    text = gpu_overlap.show(result, 0)
    assert "block 'decoder' layer 1       200    300      310    360           100 %" in text


def test_a_timeline_that_does_not_fit_the_trace_is_refused() -> None:
    with pytest.raises(RuntimeError, match="3 NCCL kernels and 2 collectives"):
        lines.timeline(three_layers(), TRACE[1:], layers=3, micro_steps=1)
    with pytest.raises(RuntimeError, match="5 marks on the timeline, expected 6"):
        lines.timeline(three_layers(), TRACE, layers=4, micro_steps=1)


def test_common_parts_of_spans() -> None:
    a = lines.union([(5, 9), (0, 2), (1, 3), (9, 9)])
    assert a == [(0, 3), (5, 9)]
    assert lines.common(a, lines.union([(2, 6), (8, 20)])) == 1 + 1 + 1
    assert lines.length(a) == 7


def test_launches_of_a_block_are_what_more_blocks_add() -> None:
    def run(blocks: int) -> list[lines.Activity]:
        memsets = [lines.Activity("memset", "Memset (Device)", 7, 0, 1)] * (blocks + 3)
        return [*memsets, *[lines.Activity("kernel", "reduce", 7, 0, 1)] * (2 * blocks + 5)]

    counts = gpu_manager.count_launches(lines.difference(run(24), run(12), 12))
    assert counts == {
        "memset": 1.0,
        "kernel": 2.0,
        "memcpy": 0.0,
        "names": {"Memset (Device)": 1.0, "reduce": 2.0},
    }
    met = [target.met for target in gpu_manager.launch_targets({"some": counts})]
    assert met == [True, False, True]


def test_traffic_counts_zeros_and_sums() -> None:
    plan = SimpleNamespace(arenas=[SimpleNamespace(weights_numel=100, zero_numel=10, count=2)])
    assert gpu_manager.traffic(plan) == [(420, 620)] * 2


def summary() -> dict[str, dict[str, Any]]:
    built = {
        name: [{"held_bytes": held, "device_bytes": 100, "planned_bytes": None, "norm": norm, "notes": {}}]
        for name, held, norm in (
            ("floor", 0, 2.0),
            ("gradgen_unsharded", 40, 2.001),
            ("gradgen_unsharded_fused", 40, 3.0),
        )
    }
    runs = {
        name: [{"ms": ms, "allocated_bytes": bytes, "reserved_bytes": bytes} for ms in (first, second)]
        for name, first, second, bytes in (
            ("floor", 100, 110, 100),
            ("gradgen_unsharded", 102, 111, 60),
            ("gradgen_unsharded_fused", 98, 109, 70),
        )
    }
    return gpu_step.summarise(runs, built)


def test_ratios_are_of_the_same_round() -> None:
    table = summary()
    assert table["gradgen_unsharded"]["of_plain"] == pytest.approx((1.02 + 111 / 110) / 2)
    assert table["gradgen_unsharded"]["peak_of_plain"] == 1.0
    assert table["gradgen_unsharded_fused"]["peak_of_plain"] == 1.1
    assert [target.met for target in gpu_step.targets(table)] == [False, True, True, False]
    assert gpu_step.check_norms(table) == ["gradgen_unsharded_fused: gradient norm 3, plain autograd 2"]
    assert "attach, fuse_wgrad   103.50   98.00..109.00" in gpu_step.show(table)


def test_a_target_without_a_measurement_is_neither_met_nor_missed() -> None:
    assert gpu_report.Target("x", None, 1.0).line() == "-       x: not measured (<= 1)"
    assert gpu_report.Target("x", 0.9, 0.8, at_least=True).line() == "met     x: 0.900 (>= 0.8)"
    assert gpu_report.Target("x", 0.7, 0.8, at_least=True).line() == "MISSED  x: 0.700 (>= 0.8)"


def test_every_part_of_the_manager_benchmark_is_shown_and_judged() -> None:
    row = {"step_ms": 10.0, "copy_ms": 9.9, "gb_per_s": 4000.0, "copy_gb_per_s": 4040.0, "of_copy": 0.99}
    results = {
        "host": {"python, direct bf16": 12.0, "python, stochastic bf16": 30.0},
        "device": {"llama-2-7b, 8 layers": row, "qwen2.5-0.5b, 24 layers": row},
        "offload": {
            "gb_per_s": 40.0,
            "copy_gb_per_s": 44.0,
            "both_ways_gb_per_s": 80.0,
            "of_copy": 40 / 44,
            "of_both_ways": 0.5,
            "manager_bytes": 100,
            "planned_bytes": 100,
            "device_drop_bytes": 104,
        },
    }
    text = gpu_manager.show(results)
    assert "stochastic bf16, whole step" in text and "copies, both ways at once" in text
    judged = {target.what: target.met for target in gpu_manager.all_targets(results)}
    assert judged["host us a block, python, direct bf16"] is True
    assert judged["host us a block, python, stochastic bf16"] is False
    assert judged["host us a block, C++, direct bf16"] is None
    assert judged["offload: device memory gone / plan"] is False
    assert judged["stochastic step's traffic / copy, llama-2-7b, 8 layers"] is True


def collective(*, all_to_all: float) -> dict[str, Any]:
    """Two ranks; the second is slower in one round."""

    def rank(late: float) -> dict[str, Any]:
        return {
            "ms": {
                "manager reduce_scatter": [2.0, 2.0 + late, 2.0],
                "manager all_to_all": [all_to_all] * 3,
                "nccl reduce_scatter": [1.9] * 3,
                "nccl all_to_all": [2.0] * 3,
                "nccl reduce_scatter fp32": [4.0] * 3,
            },
            "arena_bytes": 400_000_000,
            "transport": "nccl",
            "memory": {"reduce_scatter": [100, 100], "all_to_all": [120, 100]},
            "host_behind": 1,
        }

    return gpu_multi.join_collectives([rank(0.0), rank(1.0)], 2)


def test_collectives_are_judged_by_the_slowest_rank() -> None:
    row = collective(all_to_all=2.2)
    assert row["ms"]["manager reduce_scatter"] == 2.0 and row["host_behind"] == 2
    assert row["bus_gb_per_s"]["manager reduce_scatter"] == pytest.approx(100)
    assert row["bus_gb_per_s"]["nccl reduce_scatter fp32"] == pytest.approx(
        100
    )  # twice the bytes in twice the time
    assert row["of_nccl"] == {"reduce_scatter": pytest.approx(0.95), "all_to_all": pytest.approx(2 / 2.2)}
    results = {"collectives": {"cases": {"llama-7b bf16": row}}}
    judged = {target.what: target.met for target in gpu_multi.targets(results)}
    assert judged["llama-7b bf16 reduce_scatter: bandwidth / NCCL"] is True
    assert judged["llama-7b bf16 all_to_all: bandwidth / NCCL"] is False
    assert judged["llama-7b bf16 all_to_all: time / NCCL fp32 reduce_scatter"] is True
    assert judged["llama-7b bf16 all_to_all: bytes held / plan"] is False
    assert "llama-7b bf16  400      all_to_all      2200.0   2000.0" in gpu_multi.show(results)


def test_steps_of_several_ranks_are_judged_in_their_memory_class() -> None:
    times = {
        "floor": (100.0, None),
        "ddp_view_nosync": (104.0, None),
        "gradgen_unsharded_fused": (103.0, 50),
        "fsdp2": (130.0, None),
        "fsdp2_keep": (110.0, None),
        "gradgen_sharded_fused": (106.0, 50),
        "gradgen_sharded_all_to_all_fused": (104.0, 60),
    }
    summary = {
        name: {"step_ms": ms, "over_plain_ms": ms - 100, "planned_bytes": planned, "manager_bytes": 50}
        for name, (ms, planned) in times.items()
    }
    judged = {target.what: target.value for target in gpu_multi.targets({"step": {"summary": summary}})}
    assert judged["953M: exposed communication / FSDP2"] == pytest.approx(0.4)
    assert judged["953M, whole gradients: step / DDP"] == pytest.approx(103 / 104)
    assert judged["953M, sharded: step / best FSDP2"] == pytest.approx(104 / 110)
    assert judged["953M gradgen_sharded_all_to_all_fused: bytes held / plan"] == pytest.approx(50 / 60)


def test_scaling_is_relative_to_the_fewest_ranks() -> None:
    text = gpu_multi.show_scaling({"step_ms": {"1": {"a": 90.0}, "4": {"a": 100.0}}})
    assert "90.0 (1.000)  100.0 (0.900)" in text


def test_layers_that_fit() -> None:
    assert gpu_multi.large_layers(140) == 32
    assert gpu_multi.large_layers(24) == 10
    assert gpu_multi.large_layers(4) == 2
