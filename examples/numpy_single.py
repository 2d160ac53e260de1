"""A gradient manager without torch: one process, numpy arrays as views of its memory, and a hand-written
backward pass.

    python examples/numpy_single.py

Fits a chain of linear layers to a random linear map by gradient descent with accumulation over micro-steps.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import gradgen

SPEC = """
gradgen: 1
model: linear_chain
summary: a chain of square linear layers and a bias
dims:
  width:  {}
  layers: {}
weights:
  bias: {shape: [width], name: bias, zero: always}
blocks:
  layer:
    count: layers
    name: layers.{i}
    weights:
      weight: {shape: [width, width], name: weight, zero: never}
backward: [bias, {block: layer}]
strategies:
  unsharded: {blocks: full, collective: reduce_scatter}
"""
WIDTH, LAYERS, STEPS, MICRO_STEPS, ROWS = 16, 3, 400, 2, 32


def put(gradient: np.ndarray, native: object, accumulate: bool) -> None:
    """Writes or adds a gradient into the manager's memory, of which `from_dlpack` is a view."""
    view = np.from_dlpack(native)
    if accumulate:
        view += gradient
    else:
        view[...] = gradient


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "linear_chain.yaml")
        spec.write_text(SPEC)
        chain = gradgen.load(spec, device="cpu")
    grads = chain.GradientManager(
        chain.Config(width=WIDTH, layers=LAYERS), gradgen.comm.single(), strategy="unsharded", dtype="float32"
    )

    random = np.random.default_rng(0)
    target = random.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32)
    parameters = {
        name: np.zeros(shard.global_shape, np.float32) for name, shard in grads.named_gradients().items()
    }
    for layer in range(LAYERS):
        parameters[f"layers.{layer}.weight"][...] = np.eye(WIDTH) + random.normal(0, 0.02, (WIDTH, WIDTH))

    for step in range(STEPS):
        total = 0.0
        for i in range(MICRO_STEPS):
            inputs = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
            activations = [inputs]
            for layer in range(LAYERS):
                activations.append(activations[-1] @ parameters[f"layers.{layer}.weight"].T)
            error = activations[-1] + parameters["bias"] - inputs @ target.T
            total += float((error**2).mean()) / MICRO_STEPS
            with grads.micro_step(i, MICRO_STEPS):
                flow = 2 * error / error.size / MICRO_STEPS
                bias = grads.non_block_full("bias")
                put(flow.sum(0), bias, True)  # zero: always, so adding is right at the first touch too
                grads.notify_non_block("bias")
                for layer in reversed(range(LAYERS)):
                    block = grads.block_full(layer)
                    put(flow.T @ activations[layer], block["weight"], block.accumulate)
                    grads.notify_block(layer)
                    flow = flow @ parameters[f"layers.{layer}.weight"]
        grads.clip_grad_norm_(1.0)
        for name, shard in grads.named_gradients().items():
            parameters[name] -= 0.5 * np.from_dlpack(shard).reshape(shard.global_shape)
        grads.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {total:.5f}")
    grads.close()


if __name__ == "__main__":
    main()
