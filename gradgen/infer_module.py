"""From a torch module to facts. The module is read, never changed, and needs no memory: the meta device will do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradgen.infer_facts import InferError, Parameter

if TYPE_CHECKING:
    import torch

# torch.compile, activation checkpointing and FSDP put these into names; attach() strips them too.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def parameters_of(module: torch.nn.Module) -> tuple[Parameter, ...]:
    """Every name of every parameter, in the order of named_parameters(). Raises InferError for what cannot be one:
    lazy, quantised or overlapping parameters.
    """
    import torch

    kinds = {name: type(child).__name__ for name, child in module.named_modules(remove_duplicate=False)}
    owners: dict[int, str] = {}
    out: list[Parameter] = []
    problems: list[str] = []
    named = list(module.named_parameters(remove_duplicate=False))
    for full, parameter in named:
        name = plain_name(full)
        if torch.nn.parameter.is_lazy(parameter):
            problems.append(f"{name}: has no shape yet (lazy); run one forward pass first")
            continue
        if not (parameter.is_floating_point() or parameter.is_complex()) or parameter.dtype.itemsize < 2:
            problems.append(
                f"{name}: is quantised ({_short(parameter.dtype)}) and has no gradient; infer from the model before "
                "quantisation"
            )
            continue
        if parameter.is_complex():
            problems.append(
                f"{name}: is complex ({_short(parameter.dtype)}); gradient managers hold real numbers"
            )
            continue
        owner = owners.setdefault(id(parameter), name)
        out.append(
            Parameter(
                name,
                tuple(parameter.shape),
                parameter.requires_grad,
                "" if owner == name else owner,
                kinds.get(full.rpartition(".")[0], ""),
            )
        )
    problems += _quantised(module) + _overlaps(named)
    if problems:
        raise InferError("the model has parameters that cannot be trained as they are", problems)
    return tuple(out)


def buffers_of(module: torch.nn.Module) -> tuple[Parameter, ...]:
    """The buffers that a checkpoint holds."""
    out: dict[str, Parameter] = {}
    for path, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            full = plain_name(f"{path}.{name}" if path else name)
            if name not in child._non_persistent_buffers_set and buffer.ndim <= 5:
                out[full] = Parameter(full, tuple(buffer.shape), False)
    return tuple(out.values())


def plain_name(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _quantised(module: torch.nn.Module) -> list[str]:
    """Modules of the common quantisers keep their weights in buffers, or as parameters that cannot be trained."""
    found = []
    for name, child in module.named_modules():
        origin = type(child).__module__.split(".")[0]
        kind = type(child).__name__
        if origin in _QUANTISERS or ".quantized" in type(child).__module__:
            found.append(f"{plain_name(name) or 'the model'}: is quantised ({origin}.{kind})")
    return found


_QUANTISERS = {"bitsandbytes", "auto_gptq", "gptqmodel", "awq", "quanto", "optimum", "hqq", "aqlm", "eetq"}


def _overlaps(named: list[tuple[str, Any]]) -> list[str]:
    """Different parameters in the same memory: a gradient of one would be a gradient of the other."""
    import torch

    spans: dict[tuple[str, int], list[tuple[int, int, str, int]]] = {}
    for name, parameter in named:
        if torch.nn.parameter.is_lazy(parameter) or parameter.is_meta or not parameter.numel():
            continue
        try:
            storage = parameter.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # wrappers without memory of their own
            continue
        size = parameter.dtype.itemsize
        start = parameter.storage_offset() * size
        reach = 1 + sum((n - 1) * abs(s) for n, s in zip(parameter.shape, parameter.stride(), strict=True))
        key = (str(parameter.device), storage)
        spans.setdefault(key, []).append((start, start + reach * size, name, id(parameter)))
    problems = []
    for entries in spans.values():
        entries.sort()
        for a, b in zip(entries, entries[1:], strict=False):
            if b[0] < a[1] and a[3] != b[3]:
                problems.append(
                    f"{plain_name(b[2])}: lies in the memory of {plain_name(a[2])} and is another parameter; make "
                    "them one parameter, or give each its own memory"
                )
    return problems


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
