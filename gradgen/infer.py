"""`infer`: from a model to the spec of its gradients.

    gradgen infer config.json -o mine.yaml
    gradgen.infer(module).text

One function a stage, as everywhere in gradgen: facts (`infer_transformers`, `infer_module`, `infer_safetensors`), stacks and
kinds of blocks (`infer_stacks`, `infer_blocks`), dims (`infer_dims`, `infer_fit`), one backward pass (`infer_pass`), the text
(`infer_write`), and the round trip through gradgen itself (`infer_verify`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradgen.diagnostics import UsageError, quote
from gradgen.infer_facts import Facts, InferError, refuse_odd
from gradgen.infer_ids import model_id, snake
from gradgen.infer_verify import RoundTrip, verify
from gradgen.infer_write import Writer

if TYPE_CHECKING:
    import torch

__all__ = ["InferError", "Inferred", "RoundTrip", "infer", "infer_file"]

FACTORY = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*\Z")
SAFETENSORS = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True)
class Inferred:
    """A spec that was written, read back, planned and compared with the model."""

    model: str  # the id
    preset: str  # the name of the model's own sizes among the presets; "" where the spec has no dims
    text: str  # YAML
    findings: tuple[str, ...]  # choices, and what could not be known; also comments of the text
    round_trip: RoundTrip

    def summary(self) -> str:
        """One line: what the round trip found equal."""
        trip = self.round_trip
        parts = [f"{trip.trainable} trainable parameters ({trip.elements:,} elements)"]
        parts += [f"{trip.tied} tied names"] if trip.tied else []
        parts += [f"{trip.frozen} frozen"] if trip.frozen else []
        kinds = f"{trip.blocks} blocks of {trip.kinds} kind{'s' if trip.kinds != 1 else ''}"
        return f"{self.model}: spec and model agree on {', '.join(parts)}; {kinds}"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the spec aside and renames it, so that nobody sees half of it. Raises UsageError."""
        target = Path(path)
        aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            if target.exists() and not target.is_file():
                raise UsageError(f"{target}: is not a regular file")
            aside.write_text(self.text, encoding="utf-8")
            aside.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise UsageError(f"{target}: cannot write it: {error.strerror}") from None


def infer(
    module: torch.nn.Module,
    *,
    name: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Inferred:
    """The spec of a torch module. The module is not changed; on the meta device it needs no memory.

    name: the model's id (default: from its configuration or class). inputs: keyword arguments of one forward pass, for
    the backward pass that tells which gradients need zeros and which may be absent (default: what a transformers model
    takes; the safe choice where nothing is known). loss: from the output to a scalar (default: its `loss`, else the sum of
    its logits or tensors). Raises InferError, which lists every parameter that does not fit.
    """
    try:
        import torch
    except ImportError as error:
        raise UsageError(f"gradgen.infer needs the package torch ({error}); pip install torch") from None
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"gradgen.infer takes a torch.nn.Module, not a {type(module).__name__}")
    return _spec(_module_facts(module, name, inputs, loss))


def infer_file(model: str | os.PathLike[str], *, name: str | None = None) -> Inferred:
    """The spec of what the command line takes: a config.json or a folder with one, `package.module:factory`, or a
    safetensors file or index. Raises UsageError and InferError.
    """
    text = os.fspath(model)
    path = Path(text)
    if text.endswith(SAFETENSORS):
        from gradgen.infer_safetensors import facts_of_checkpoint

        return _spec(facts_of_checkpoint(path, name))
    if path.is_dir():
        config = path / "config.json"
        if not config.is_file():
            raise UsageError(
                f"{path}: has no config.json; name a safetensors file to read a checkpoint's header"
            )
        return _config(config, name)
    if os.path.lexists(text):
        return _config(path, name)
    if FACTORY.match(text):
        return infer(_factory(text), name=name)
    raise UsageError(
        f"{quote(text)}: no such file; a model is a config.json or a folder with one, package.module:factory, or a "
        "safetensors file or index"
    )


def infer_class(cls: type, config: Any, *, name: str | None = None) -> Inferred:
    """The spec of a transformers class as `config` builds it, on the meta device. Raises InferError."""
    from gradgen.infer_transformers import facts_of

    module, facts = facts_of(cls, config, model_id(name or str(config.model_type)))
    return _spec(_with_pass(facts, module))


def _config(path: Path, name: str | None) -> Inferred:
    from gradgen.infer_config import class_for, read_config
    from gradgen.infer_transformers import facts_of

    data = read_config(path)
    cls, config = class_for(data)
    module, facts = facts_of(cls, config, model_id(name or str(config.model_type)))
    if data.get("quantization_config"):
        note = (
            "the configuration asks for quantised weights; these are the gradients of the weights before that"
        )
        facts = replace(facts, notes=(*facts.notes, note))
    return _spec(_with_pass(facts, module))


def _module_facts(
    module: torch.nn.Module, name: str | None, inputs: Mapping[str, Any] | None, loss: Any = None
) -> Facts:
    from gradgen.infer_module import buffers_of, parameters_of

    parameters = parameters_of(module)
    refuse_odd(parameters)
    config = getattr(module, "config", None)
    kind = str(getattr(config, "model_type", "") or snake(type(module).__name__))
    facts = Facts(
        model_id(name or kind),
        f"{type(module).__name__} of {_origin(module)}",
        parameters,
        buffers_of(module),
    )
    if hasattr(config, "get_text_config"):
        facts = _same_class(module, config, facts)
    return _with_pass(facts, module, inputs, loss)


def _same_class(module: torch.nn.Module, config: Any, facts: Facts) -> Facts:
    """Dims from the configuration, if building the class from it gives these parameters."""
    from gradgen.infer_transformers import facts_of

    cls = type(module)
    if getattr(cls, "config_class", None) is not type(config):
        base = getattr(module, "get_base_model", None)  # peft
        cls = type(base()) if callable(base) else cls
    with contextlib.suppress(InferError):
        _, built = facts_of(cls, config, facts.model, vary_keys=False)
        shapes = {p.name: p.shape for p in built.parameters}
        if shapes == {p.name: p.shape for p in facts.parameters}:
            _, built = facts_of(cls, config, facts.model)
            return replace(built, parameters=facts.parameters, buffers=facts.buffers, summary=facts.summary)
        return replace(facts, values=built.values, model_type=built.model_type, preset=built.preset)
    return facts


def _origin(module: torch.nn.Module) -> str:
    return type(module).__module__.split(".")[0]


def _with_pass(
    facts: Facts, module: torch.nn.Module, inputs: Mapping[str, Any] | None = None, loss: Any = None
) -> Facts:
    from gradgen.infer_pass import NoPass, backward_pass

    try:
        shown = backward_pass(module, inputs, loss)
    except NoPass as reason:
        note = (
            f"it could not be run here ({reason}): every gradient starts at zero (zero: always), and the order of `backward` "
            "is the reverse of the declarations; a weight without a gradient needs may_be_absent: true. "
            "gradgen.infer(module, inputs={'name': tensor}) in Python runs it"
        )
        return replace(facts, no_backward=str(reason), notes=(*facts.notes, note))
    notes = [
        f"zero, may_be_absent and the order of `backward` are what one backward pass with {shown.inputs} showed"
    ]
    tied = {p.owner for p in facts.parameters}
    several = [name for name, uses in shown.uses.items() if uses > 1 and name not in tied]
    if several:
        from gradgen.infer_yaml import listed

        notes.append(
            f"used several times in a pass: {listed(several, 3)}; autograd sums before gradgen sees them, a backward pass "
            "of your own declares `uses`"
        )
    return replace(facts, backward=shown, notes=(*facts.notes, *notes))


def _spec(facts: Facts) -> Inferred:
    refuse_odd(facts.parameters)
    writer = Writer(facts)
    text = writer.text()
    model, round_trip = verify(text, facts)
    return Inferred(
        facts.model, model.presets[0].name if model.presets else "", text, tuple(writer.notes), round_trip
    )


def _factory(text: str) -> torch.nn.Module:
    """The module that `package.module:factory` returns, built on the meta device."""
    try:
        import torch
    except ImportError as error:
        raise UsageError(f"a module needs the package torch ({error}); pip install torch") from None
    package, _, attribute = text.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(package)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{text}: cannot import it: {error}") from None
    if not callable(factory):
        raise UsageError(f"{text}: is no function that returns a module")
    try:
        with torch.device("meta"):
            module = factory()
    except Exception as error:
        raise UsageError(f"{text}: {type(error).__name__}: {str(error)[:200]}") from error
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"{text}: returned a {type(module).__name__}, not a torch.nn.Module")
    return module
