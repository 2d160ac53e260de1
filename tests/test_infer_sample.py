"""A sample of the architectures benchmark that changes with the commit; `benchmarks/architectures.py` runs all of it."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from gradgen.infer import infer_class
from gradgen.infer_transformers import build

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from tiny_models import CAUSAL, MODELS, make  # noqa: E402

_found = importlib.util.spec_from_file_location(
    "architectures_benchmark", ROOT / "benchmarks" / "architectures.py"
)
assert _found is not None and _found.loader is not None
architectures = importlib.util.module_from_spec(_found)
_found.loader.exec_module(architectures)


def sample(names: list[str], count: int) -> list[str]:
    """The same names for the same commit, on every machine."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return sorted(random.Random(done.stdout.strip()).sample(names, count))


# bart: every block has weights that get no gradient.
@pytest.mark.slow
@pytest.mark.parametrize("name", list(dict.fromkeys(["bart", *sample(MODELS, 1)])))
def test_a_tiny_model_trains_with_the_gradients_of_autograd(name: str, tmp_path: Path) -> None:
    result = architectures.train(name, tmp_path)
    assert result["ok"], result["reason"]
    assert len(result["errors"]) == 5


@pytest.mark.parametrize("name", sample(list(CAUSAL), 6))
def test_a_class_with_its_default_configuration_round_trips(name: str) -> None:
    cls = getattr(transformers, CAUSAL[name])
    try:
        config = cls.config_class()
        parameters = list(build(cls, config).parameters())
    except Exception as error:  # some classes have defaults that they do not accept
        pytest.skip(f"transformers does not build it: {error}")
    trip = infer_class(cls, config, name=name).round_trip
    assert trip.trainable == sum(p.requires_grad for p in parameters)


def test_a_wrong_gradient_is_seen() -> None:
    """The comparison itself: one element of one gradient that is 1e-4 off."""
    import torch

    class Shard:
        def __init__(self, values: torch.Tensor) -> None:
            self.values, self.offset, self.numel = values, 0, values.numel()

        def __dlpack__(self, **_: object) -> object:
            return self.values.__dlpack__()

        def __dlpack_device__(self) -> object:
            return self.values.__dlpack_device__()

    class Grads:
        def __init__(self, **shards: torch.Tensor) -> None:
            self.shards = {name: Shard(values) for name, values in shards.items()}

        def named_gradients(self) -> dict[str, Shard]:
            return self.shards

    right = torch.ones(100)
    wrong = right.clone()
    wrong[7] += 1e-4
    assert architectures.worst(Grads(a=right), {"a": right}) == 0
    assert architectures.worst(Grads(a=wrong), {"a": right}) > architectures.TOLERANCE
    assert architectures.worst(Grads(a=right, b=wrong), {"a": right}) > architectures.TOLERANCE
    with pytest.raises(AssertionError, match=r"no gradients of \['b'\]"):
        architectures.worst(Grads(a=right), {"a": right, "b": right})


def test_models_are_the_same_at_each_call() -> None:
    import torch

    (a, first), (b, second) = make("qwen3", 2), make("qwen3", 2)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert torch.equal(first[1]["input_ids"], second[1]["input_ids"])
    assert not torch.equal(first[0]["input_ids"], first[1]["input_ids"])
