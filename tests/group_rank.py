"""One gloo rank of test_contract_group.py: what happens over a process group that nobody can wake.

python -m tests.group_rank SCENARIO
"""

from __future__ import annotations

import gc
import os
import sys
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

import gradgen
from tests.support import config, fill_block, fill_weight, model, outside, shards, whole_step

SHORT = timedelta(seconds=2)


def manager(comm: Any) -> Any:
    return model().GradientManager(config(), comm, strategy="sharded")


def half_a_step(grads: Any) -> None:
    """Leaves exchanges in flight: blocks are posted, and nobody has summed them."""
    grads.start_micro_step(0, 1)
    visit_half(grads)


def visit_half(grads: Any) -> None:
    for name in outside(grads)[:3]:
        fill_weight(grads, name, 1.0)
    for layer in (2, 1):
        fill_block(grads, layer, 1.0)


def adopt(comm: Any) -> None:
    """A manager that is dropped in the middle of a step leaves its memory to the exchanges in flight."""
    for _ in range(3):
        grads = manager(comm)
        half_a_step(grads)
        del grads
        gc.collect()
        trash = [np.full(1 << 12, 7, np.uint8) for _ in range(50)]  # whoever still writes there would be seen
        comm.barrier()
        assert all(np.all(t == 7) for t in trash)
    grads = manager(comm)
    whole_step(grads, 2, lambda m: 3.0)
    assert all(np.all(v == 6.0) for _, _, v in shards(grads).values())


def late(comm: Any) -> None:
    """A rank that does not come is a CommTimeout after the group's own limit, and every later call says so."""
    grads = manager(comm)
    if dist.get_rank() == 1:
        time.sleep(6)
        os._exit(0)
    start = time.monotonic()
    try:
        whole_step(grads, 1, lambda m: 1.0)
    except gradgen.CommError as error:
        print(f"LATE {type(error).__name__} {time.monotonic() - start:.1f} {error}", flush=True)
    try:
        grads.start_micro_step(0, 1)
    except gradgen.CommError as error:
        print(f"AGAIN {'reset' in str(error)}", flush=True)
    del grads
    gc.collect()  # memory that the group may still write to is kept, not freed
    os._exit(0)


def interrupted(comm: Any) -> None:
    """Ctrl-C in the middle of a backward pass, with exchanges in flight: the step is lost, the process ends as usual."""
    grads = manager(comm)
    if dist.get_rank() == 1:
        half_a_step(grads)
        time.sleep(4)
        os._exit(0)
    try:
        with grads.micro_step(0, 1):
            visit_half(grads)
            print("READY", flush=True)
            time.sleep(30)
    except KeyboardInterrupt:
        print("INTERRUPTED", flush=True)
    try:
        grads.start_micro_step(0, 1)
    except gradgen.CommError as error:
        print(f"AGAIN {'KeyboardInterrupt' in str(error) and 'reset' in str(error)}", flush=True)
    sys.exit(0)  # the ordinary way out, past every destructor


def leaves(comm: Any) -> None:
    """The interpreter ends with a manager alive, in the middle of a step, as a script that is through does."""
    grads = manager(comm)
    whole_step(grads, 1, lambda m: 1.0)
    half_a_step(grads)
    globals()["kept"] = grads
    print("LEAVING", flush=True)


def main(scenario: str) -> None:
    dist.init_process_group("gloo", timeout=SHORT if scenario == "late" else timedelta(seconds=30))
    comm = gradgen.comm.from_torch(transport="group")
    {"adopt": adopt, "late": late, "interrupted": interrupted, "leaves": leaves}[scenario](comm)
    if scenario != "leaves":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
