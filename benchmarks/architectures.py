"""Which architectures `gradgen infer` covers, as a table, a count, and JSON in benchmarks/results/.

    python benchmarks/architectures.py                 # both parts, all models
    python benchmarks/architectures.py tiny qwen3 bart # a part, some models

defaults: every causal language model class of the installed transformers that its own default configuration builds on the
meta device: infer, and the round trip spec -> plan.
tiny: real classes with tiny configurations (tiny_models.py): infer, build, attach, and one training step on two ranks for
every strategy, whose gradients must equal plain autograd's to 1e-6 (fp32).

Results are kept in .cache/architectures/ and used again while gradgen and this file have not changed, so that a run that was
stopped goes on where it was, and several processes can share the models. Failures are listed with their reasons.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
KEPT = ROOT / ".cache" / "architectures"
WORLD, TOLERANCE, TIMEOUT = 2, 1e-6, 120.0
Result = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=["defaults", "tiny", "all"], default="all")
    parser.add_argument("models", nargs="*", help="names (default: all)")
    parser.add_argument("--fresh", action="store_true", help="use no kept results")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results/ alone")
    arguments = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("GRADGEN_CACHE", str(ROOT / ".cache" / "gradgen-architectures"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    report: dict[str, Any] = {}
    for part, run in PARTS.items():
        if arguments.part in (part, "all"):
            report[part] = run(arguments.models, arguments.fresh)
    whole = arguments.part == "all" and not arguments.models
    if whole and not arguments.no_write:
        out = HERE / "results" / "architectures.json"
        out.write_text(json.dumps({**_machine(), **report}, indent=1) + "\n")
        print(f"written: {out.relative_to(ROOT)}")
    return 0 if all(result["ok"] for part in report.values() for result in part["models"].values()) else 1


def defaults(chosen: Sequence[str], fresh: bool) -> Result:
    """Classes at their default sizes: the round trip."""
    import transformers
    from tiny_models import CAUSAL

    from gradgen.infer import infer_class
    from gradgen.infer_facts import InferError
    from gradgen.infer_transformers import build

    transformers.logging.set_verbosity_error()
    unbuilt: dict[str, str] = {}

    def measure(name: str) -> Result | None:
        cls = getattr(transformers, CAUSAL[name])
        try:
            config = cls.config_class()
            build(cls, config)
        except Exception as error:  # transformers' own business
            unbuilt[name] = _reason(error)
            return None
        start = time.perf_counter()
        try:
            found = infer_class(cls, config, name=name)
        except InferError as error:
            return {"ok": False, "reason": str(error)[:500]}
        trip = found.round_trip
        return {
            "ok": True,
            "seconds": round(time.perf_counter() - start, 1),
            "parameters": trip.trainable,
            "kinds": trip.kinds,
            "tied": trip.tied,
            "frozen": trip.frozen,
            "lines": len(found.text.splitlines()),
            "pass": not any(note.startswith("it could not be run") for note in found.findings),
        }

    key = _hash([*ROOT.glob("gradgen/*.py")], transformers.__version__)
    results = _each("defaults", chosen or list(CAUSAL), key, fresh, measure)
    part = _counted(results, "infer and round-trip")
    print(f"not buildable from their defaults: {len(unbuilt)}")
    for name, reason in unbuilt.items():
        print(f"  {name}: {reason}")
    return {**part, "not_buildable": unbuilt}


def tiny(chosen: Sequence[str], fresh: bool) -> Result:
    """Tiny models: one training step for every strategy."""
    from tiny_models import MODELS

    code = _hash(
        [
            *ROOT.glob("gradgen/**/*.py"),
            *(p for p in ROOT.glob("gradgen/runtime/**/*") if p.is_file()),
            *ROOT.glob("templates/*"),
            *HERE.glob("architectures.py"),
            *HERE.glob("tiny_*.py"),
        ]
    )
    results = _each("tiny", chosen or MODELS, code, fresh, train)
    return _counted(results, f"train with exact gradients at W = {WORLD}")


def train(name: str, folder: Path = KEPT) -> Result:
    """Infers, builds, attaches, steps. Every strategy's largest relative error. `folder`: for the spec."""
    import torch
    from tiny_models import loss_of, make

    import gradgen

    model, batches = make(name, WORLD)
    start = time.perf_counter()
    found = _infer(name, model, batches[0])
    seconds = time.perf_counter() - start
    spec = folder / f"{found.model}.yaml"
    found.write(spec)
    module = gradgen.load(spec, log=lambda _: None)
    preset = found.preset
    config = module.Config.preset(preset) if preset else module.Config()
    wanted: dict[str, torch.Tensor] = {}
    for batch in batches:
        alone = copy.deepcopy(model)
        loss_of(alone, batch).backward()
        for key, p in alone.named_parameters():
            if p.grad is not None:
                wanted[key] = wanted.get(key, torch.zeros_like(p.grad)) + p.grad / WORLD
    buffers = max(
        (int(n) for note in found.findings for n in re.findall(r"block_buffers=(\d+)", note)), default=2
    )
    strategies = module.GradientManager._strategies
    errors = {s: step(module, config, s, buffers, model, batches, wanted) for s in strategies}
    bad = {s: e for s, e in errors.items() if not e <= TOLERANCE}
    return {
        "ok": not bad,
        "reason": f"relative errors {bad}" if bad else "",
        "errors": errors,
        "seconds": round(seconds, 1),
        "parameters": found.round_trip.trainable,
        "kinds": found.round_trip.kinds,
        "tied": found.round_trip.tied,
        "frozen": found.round_trip.frozen,
        "buffers": buffers,
        "absent": found.text.count("may_be_absent: true"),
        "lines": len(found.text.splitlines()),
    }


def _infer(name: str, model: Any, batch: dict[str, Any]) -> Any:
    """The spec, with a pass over one batch: labels go to the model where it takes them, else to the loss."""
    import inspect

    from tiny_models import loss_without

    import gradgen

    id = "tiny_" + name.removeprefix("other.").replace("-", "_")
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "labels" not in batch or "labels" in inspect.signature(inner.forward).parameters:
        return gradgen.infer(model, name=id, inputs=batch)
    inputs = {key: value for key, value in batch.items() if key != "labels"}

    def loss(output: Any) -> Any:
        return loss_without(output, batch["labels"].to(output[0].device))

    return gradgen.infer(model, name=id, inputs=inputs, loss=loss)


def step(
    module: Any,
    config: Any,
    strategy: str,
    buffers: int,
    model: Any,
    batches: list[Any],
    wanted: dict[str, Any],
) -> float:
    """One training step of replicas in threads; the largest relative error of any shard."""
    from tiny_models import loss_of

    import gradgen
    from gradgen.torch import attach

    comms = gradgen.comm.threads(WORLD, timeout=TIMEOUT)
    replicas = [copy.deepcopy(model) for _ in range(WORLD)]
    errors: list[float] = [0.0] * WORLD
    failures: list[BaseException] = []

    def rank(r: int) -> None:
        try:
            grads = module.GradientManager(
                config, comms[r], strategy=strategy, dtype="float32", block_buffers=buffers
            )
            attach(replicas[r], grads)
            with grads.micro_step(0, 1):
                loss_of(replicas[r], batches[r]).backward()
            errors[r] = worst(grads, wanted)
            grads.close()
        except BaseException as error:
            failures.append(error)

    ranks = [threading.Thread(target=rank, args=(r,)) for r in range(WORLD)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    if failures:
        raise failures[0]
    return max(errors)


def worst(grads: Any, wanted: dict[str, Any]) -> float:
    """Shards against whole gradients; a weight without one must be zero."""
    import torch

    worst = 0.0
    named = grads.named_gradients()
    missing = set(wanted) - set(named)
    if missing:
        raise AssertionError(f"no gradients of {sorted(missing)[:3]}")
    for name, shard in named.items():
        if not shard.numel:
            continue
        got = torch.from_dlpack(shard).reshape(-1).double()
        if name not in wanted:
            worst = max(worst, got.abs().max().item())
            continue
        whole = wanted[name].double().reshape(-1)
        part = whole[shard.offset : shard.offset + shard.numel]
        scale = whole.norm() * (shard.numel / whole.numel()) ** 0.5
        size = torch.maximum(part.norm(), scale).item()
        error = (got - part).norm().item()
        worst = max(worst, error / size if size else error)
    return worst


PARTS: dict[str, Callable[[Sequence[str], bool], Result]] = {"defaults": defaults, "tiny": tiny}


def _each(
    part: str, names: Sequence[str], key: str, fresh: bool, measure: Callable[[str], Result | None]
) -> dict[str, Result]:
    """Measures one model after the other, keeps each result, and prints it."""
    folder = KEPT / part
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Result] = {}
    for name in names:
        file = folder / f"{name}.json"
        kept = json.loads(file.read_text()) if file.is_file() and not fresh else {}
        if kept.get("key") == key and kept["ok"]:
            results[name] = kept
        else:
            try:
                found = measure(name)
            except Exception as error:  # whatever goes wrong with a model is its result
                found = {"ok": False, "reason": _reason(error)}
            if found is None:
                continue
            results[name] = {**found, "key": key}
            aside = file.with_suffix(f".{os.getpid()}.tmp")
            aside.write_text(json.dumps(results[name]))
            aside.replace(file)
        print(_row(name, results[name]), flush=True)
    return results


def _row(name: str, result: Result) -> str:
    if not result["ok"]:
        return f"{name:<28} FAIL  {result['reason'][:300]}"
    columns = [
        f"{result[c]:>5} {c}"
        for c in ("parameters", "kinds", "tied", "frozen", "absent", "lines")
        if c in result
    ]
    error = f"  error {max(result['errors'].values()):.1e}" if "errors" in result else ""
    return f"{name:<28} ok  {'  '.join(columns)}{error}  {result['seconds']} s"


def _counted(results: dict[str, Result], what: str) -> Result:
    good = [name for name, result in results.items() if result["ok"]]
    print(f"\n{len(good)} of {len(results)} {what}")
    for name, result in results.items():
        if not result["ok"]:
            print(f"  {name}: {result['reason']}")
    plain = {name: {k: v for k, v in result.items() if k != "key"} for name, result in results.items()}
    return {"good": len(good), "of": len(results), "models": plain}


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " | ")[:500]


def _hash(files: Sequence[Path], more: str = "") -> str:
    digest = hashlib.sha256(more.encode())
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _machine() -> Result:
    return dict(_facts())


def _facts() -> Iterator[tuple[str, Any]]:
    import torch
    import transformers

    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    yield "commit", done.stdout.strip()
    yield "python", platform.python_version()
    yield "torch", torch.__version__
    yield "transformers", transformers.__version__
    yield "cores", os.cpu_count()


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main())
