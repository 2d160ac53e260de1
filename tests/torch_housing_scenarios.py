"""What the ranks of test_torch_housing.py do in a gloo group."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradgen
from gradgen.torch import ShardedOptimizer, attach
from tests.parameter_bag import Bag, train
from tests.support import config, model


def both_transports(cases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Digests of the trained parameters, by case and transport."""
    results = {}
    for case, options in cases.items():
        changes = {key: value for key, value in options.items() if key != "dtype"}
        for transport in ("shared", "group"):
            comm = gradgen.comm.from_torch(transport=transport)
            grads = model().GradientManager(
                config(**changes), comm, strategy="sharded", dtype=options.get("dtype", "float32")
            )
            bag = Bag(grads)
            attach(bag, grads)
            # Pieces of a few elements: some are sent as they lie, others are packed.
            optimizer = ShardedOptimizer(torch.optim.SGD, bag, grads, lr=0.25, momentum=0.5, gather_bytes=16)
            train(bag, grads, optimizer, dist.get_rank(), 3)
            digest = hashlib.sha256()
            for name, p in sorted(bag.named_parameters()):
                digest.update(
                    name.encode() + p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
            results[f"{case} {transport}"] = digest.hexdigest()
            grads.close()
    return results


def dies_before_the_update() -> dict[str, str]:
    """The last rank ends after its backward pass; the others are told within the update."""
    grads = model().GradientManager(config(), gradgen.comm.from_torch(transport="shared"))
    bag = Bag(grads)
    attach(bag, grads)
    optimizer = ShardedOptimizer(torch.optim.SGD, bag, grads, lr=0.25)
    train(bag, grads, optimizer, dist.get_rank(), 1)
    train(bag, grads, None, dist.get_rank(), 1)
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(9)
    message = "no error"
    try:
        optimizer.step()
    except gradgen.CommError as error:
        message = f"{type(error).__name__}: {error}"
    import json

    Path(sys.argv[2]).write_text(json.dumps({"message": message}))
    os._exit(0)  # the group is broken: nothing to wait for
