"""Trains a small byte-level Llama on the sources of Python's standard library, with sharded gradients and
optimizer state.

    torchrun --standalone --nproc-per-node 2 examples/train_llama.py --steps 200

Runs on processors, with any number of ranks. Writes loss.png and a Hugging Face checkpoint
(model.safetensors) to --out.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import gradgen
from gradgen.torch import ShardedOptimizer, attach

SPEC = Path(__file__).resolve().parents[1] / "specs" / "llama.yaml"
LENGTH, BATCH, MICRO_STEPS = (
    128,
    8,
    2,
)  # tokens a sequence; sequences a micro-step and rank; micro-steps a step
PEAK_LR, WARMUP, MAX_NORM = 4e-3, 20, 1.0


def corpus(limit: int = 8 << 20) -> torch.Tensor:
    """The standard library's sources as bytes, [n] uint8."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) > limit:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def batch(data: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """[BATCH, LENGTH] token ids at random places."""
    starts = torch.randint(0, data.numel() - LENGTH, (BATCH,), generator=generator)
    return torch.stack([data[start : start + LENGTH] for start in starts.tolist()]).long()


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth; a factor of PEAK_LR."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / max(steps - WARMUP, 1))


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same parameters on every rank
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def save(model: LlamaForCausalLM, losses: list[float], strategy: str, out: Path) -> None:
    """Checkpoint and loss curve; rank 0 only."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(losses, color="#1f5a96", linewidth=1.2)
    axes.set(
        xlabel="step",
        ylabel="loss, nats a byte",
        title=f"Llama on Python's standard library: {dist.get_world_size()} ranks, {strategy}",
    )
    axes.grid(alpha=0.3)
    figure.savefig(out / "loss.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--strategy", default="sharded", help="a strategy of specs/llama.yaml")
    parser.add_argument("--out", type=Path, default=Path("runs/llama"))
    args = parser.parse_args()
    torch.set_num_threads(max((os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build_model()
    llama = gradgen.load(SPEC, device="cpu")
    config = llama.Config.from_hf(model.config)
    grads = llama.GradientManager(
        config, gradgen.comm.from_torch(), strategy=args.strategy, dtype="float32", device="cpu", seed=0
    )
    attach(model, grads)
    optimizer = ShardedOptimizer(
        torch.optim.AdamW,
        model,
        grads,
        lr=PEAK_LR,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        no_decay=lambda name, parameter: parameter.ndim < 2,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args.steps))

    data, generator = corpus(), torch.Generator().manual_seed(1 + rank)
    losses: list[float] = []
    start = time.perf_counter()
    with tqdm(total=args.steps, disable=rank != 0, unit="step") as bar:
        for step in range(args.steps):
            total = 0.0
            for i in range(MICRO_STEPS):
                tokens = batch(data, generator)
                with grads.micro_step(i, MICRO_STEPS):
                    loss = model(input_ids=tokens, labels=tokens).loss / MICRO_STEPS
                    loss.backward()
                total += loss.item()
            norm = optimizer.step(max_norm=MAX_NORM)
            optimizer.zero_grad()
            schedule.step()
            losses.append(mean_over_ranks(total))
            speed = (step + 1) * world * MICRO_STEPS * BATCH * LENGTH / (time.perf_counter() - start)
            bar.set_postfix_str(
                f"loss {losses[-1]:.3f}, norm {float(norm):.2f}, {speed:,.0f} tokens/s", refresh=False
            )
            bar.update()
    if rank == 0:
        save(model, losses, args.strategy, args.out)
        print(
            f"loss {losses[0]:.2f} -> {sum(losses[-10:]) / len(losses[-10:]):.2f}; "
            f"wrote {args.out}/loss.png and model.safetensors"
        )
    dist.barrier()
    grads.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
