"""A timeline of one step at W ranks over NCCL: the reduction of block l runs while block l - 1 computes.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/gpu_overlap.py
    NCCL_MULTI_RANK_GPU_ENABLE=1 ... the same                   # both ranks on one GPU, NCCL 2.30 or later

Rank r uses GPU r modulo their number. The process group is gloo and only brings the ranks together; the manager makes
its own NCCL communicator (GRADGEN_NCCL names another libnccl than torch's). Times are of the profiler, microseconds
from the start of the step. Results go to benchmarks/results/gpu_overlap.json.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ["NCCL_NVLS_ENABLE"] = "0"  # before NCCL is opened

from gpu_report import RESULTS, Target, command_line, table, targets_json, write  # noqa: E402
from gpu_timeline import Timeline, layer_of, mark, record, timeline  # noqa: E402

STRATEGIES = ("sharded", "sharded_all_to_all")


def run(args: argparse.Namespace) -> tuple[Timeline, dict[str, Any]]:
    import torch
    import torch.distributed as dist
    from gpu_model import SIZES, batches, make, mark_layers
    from gpu_step_rank import machine
    from gpu_variants import gradgen_variant

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    size = SIZES[args.size]
    if args.layers:
        size = size._replace(layers=args.layers)
    model = make(size, device)
    variant = gradgen_variant(model, size, args.strategy, not args.unfused, device)
    data = batches(size, device, args.micro_steps)

    def step(marked: bool) -> None:
        for i, (tokens, targets) in enumerate(data):
            if marked:
                mark()
            with variant.micro(i, len(data)):
                (variant.forward(tokens, targets) / len(data)).backward()
                if marked:
                    mark()

    for _ in range(3):
        step(False)
    undo = mark_layers(model, lambda _layer: mark())
    record(lambda: None)  # the profiler's own start

    def together() -> None:
        dist.barrier()  # profilers start at different times, and a kernel of NCCL waits for the other rank's
        step(True)

    found = record(together)
    for remove in undo:
        remove()
    result = timeline(found, variant.trace(), size.layers, args.micro_steps)
    transport = variant.notes["transport"]
    variant.close()
    return result, {**machine(device), "transport": transport, "gpus": torch.cuda.device_count()}


def show(result: Timeline, micro_step: int) -> str:
    """The blocks of one micro-step, last layer first."""
    compute = result.compute[micro_step]
    rows = [["unit", "computed", "until", "reduced", "until", "beside compute"]]
    for exchange in result.exchanges:
        if exchange.micro_step != micro_step:
            continue
        layer = layer_of(exchange.unit)
        span = [f"{time:.0f}" for time in compute[layer]] if layer is not None else ["", ""]
        rows.append(
            [
                exchange.unit,
                *span,
                f"{exchange.start:.0f}",
                f"{exchange.end:.0f}",
                f"{100 * exchange.covered:.0f} %",
            ]
        )
    return table(rows)


def targets(result: Timeline) -> list[Target]:
    share = result.behind / result.blocks if result.blocks else None
    return [Target("blocks reduced while the next one computes, share", share, 0.9, at_least=True)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=["953m", "7b", "tiny"], default="953m")
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model has")
    parser.add_argument("--strategy", choices=STRATEGIES, default=STRATEGIES[0])
    parser.add_argument("--micro-steps", type=int, default=2)
    parser.add_argument("--unfused", action="store_true", help="attach without fuse_wgrad")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_overlap.json")
    args = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun: python -m torch.distributed.run --nproc-per-node 2 ...")
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    result, machine = run(args)
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, result.overlapped)
    rank = dist.get_rank()
    if rank == 0:
        met = targets(result)
        write(
            args.out,
            {
                "machine": machine,
                "command": command_line("torchrun benchmarks/gpu_overlap.py"),
                "world": len(shares),
                "size": args.size,
                "strategy": args.strategy,
                "fuse_wgrad": not args.unfused,
                "overlapped": result.overlapped,
                "overlapped_of_ranks": shares,
                "exposed_us": result.exposed_us,
                "targets": targets_json(met),
                "compute_us": result.compute,
                "exchanges": [exchange._asdict() for exchange in result.exchanges],
            },
        )
        print(
            f"{args.size}, {args.strategy}, {len(shares)} ranks over {machine['transport']}, last micro-step"
        )
        print(show(result, args.micro_steps - 1))
        print(
            f"{result.behind} of {result.blocks} blocks were reduced while the next one computed; "
            f"{100 * result.overlapped:.0f} % of the reductions' time had computation beside it, "
            f"{result.exposed_us:.0f} us had none"
        )
        print("\n".join(target.line() for target in met))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
