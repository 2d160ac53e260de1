"""Random models, visits, dtypes and worlds against a plain float64 reference.

Contributions are small integers, so that every sum is exact in every dtype that is drawn and the comparison can be exact up to
the one division by the number of ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import STRATEGIES, assemble, config, fill_block, fill_weight, model, run_ranks, shards

DTYPES = [
    {"dtype": "float32"},
    {"dtype": "float64"},
    {"dtype": "bfloat16", "accumulator": "float32"},
    {"dtype": "float16", "accumulator": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "rounding": "stochastic"},
    {"dtype": "float32", "wire": "bfloat16"},
]


@st.composite
def steps(draw: Any) -> dict[str, Any]:
    """A configuration, a world, and for every rank and micro-step which blocks are visited and with what."""
    world, micro_steps, layers = (
        draw(st.sampled_from([1, 2, 3, 4])),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 5)),
    )
    visits = st.integers(0, 3)  # 0: not visited; otherwise the gradient
    plan = draw(
        st.lists(visits, min_size=world * micro_steps * layers, max_size=world * micro_steps * layers)
    )
    grid = np.asarray(plan, float).reshape(world, micro_steps, layers)
    for rank in range(world):  # every block at least once a step on every rank
        for layer in range(layers):
            if not grid[rank, :, layer].any():
                grid[rank, draw(st.integers(0, micro_steps - 1)), layer] = 1
    return {
        "world": world,
        "grid": grid,
        "config": {
            "layers": layers,
            "hidden": draw(st.sampled_from([1, 3, 6, 65])),
            "odd": draw(st.sampled_from([1, 5, 8, 17])),
            "vocab": draw(st.sampled_from([1, 7, 64])),
            "bias": draw(st.booleans()),
            "tied": draw(st.booleans()),
            "frozen": draw(st.booleans()),
        },
        "strategy": draw(st.sampled_from(STRATEGIES)),
        "options": draw(st.sampled_from(DTYPES)),
        "block_buffers": draw(st.integers(1, 3)),
        "divide": draw(st.sampled_from(["mean", 1, 8])),
        "repeat": draw(st.integers(1, 2)),
    }


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps())
def test_random_steps_equal_the_reference(case: dict[str, Any]) -> None:
    grid, world = case["grid"], case["world"]
    micro_steps, layers = grid.shape[1:]
    module = model()

    def body(rank: int, comm: Any) -> Any:
        grads = module.GradientManager(
            config(**case["config"]), comm, strategy=case["strategy"], divide=case["divide"],
            block_buffers=case["block_buffers"], poison=True, **case["options"],
        )  # fmt: skip
        present = {w.id for w in grads.weights() if w.block is None and w.trainable}
        for _ in range(case["repeat"]):
            grads._native.poison()
            for m in range(micro_steps):
                with grads.micro_step(m, micro_steps):
                    for name in ("lm_head", "spare", "logit_scale"):
                        if name in present:
                            fill_weight(grads, name, rank + 1.0)
                    for layer in reversed(range(layers)):
                        if grid[rank, m, layer]:
                            fill_block(grads, layer, grid[rank, m, layer])
                    for name in ("twice", "twice", "positions", "embedding"):
                        if name in present:
                            fill_weight(grads, name, rank + 1.0)
        norm = grads.grad_norm()
        assert grads.trace() == [
            tuple(entry) for entry in grads.plan_for(micro_steps).trace(case["strategy"])
        ]
        return shards(grads), norm

    results = run_ranks(world, body)
    whole = assemble([shard for shard, _ in results])
    divisor = world if case["divide"] == "mean" else case["divide"]
    tolerance = (
        2**-8 if case["options"].get("accumulator", case["options"]["dtype"]) in ("bfloat16",) else 1e-6
    )
    outside = sum(rank + 1.0 for rank in range(world)) * micro_steps / divisor
    for name, value in whole.items():
        uses = 2 if name == "twice" or (name == "embed.weight" and case["config"]["tied"]) else 1
        want = outside * uses
        if name.startswith("layers."):
            want = grid[:, :, int(name.split(".")[1])].sum() / divisor
        assert np.allclose(value, want, rtol=tolerance, atol=0), (name, value.ravel()[:4], want)
    norm = np.sqrt(sum((value**2).sum() for value in whole.values()))
    assert all(abs(seen - norm) <= 1e-5 * norm for _, seen in results)
