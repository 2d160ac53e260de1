"""What `gradgen infer` knows about a model: plain facts, whatever they were read from.

A module, a configuration and a checkpoint's header all become `Facts`; everything after this works on names and
shapes alone and knows neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradgen.diagnostics import Error

MAX_SHOWN = 40
EXPERT = re.compile(r"(^|\.)experts\.([0-9]+)\.")  # in a name, where each expert has weights of its own


def word_set(text: str) -> frozenset[str]:
    """A set of words, readable in source."""
    return frozenset(text.split())


class InferError(Error):
    """A model that no spec describes. `problems` lists every parameter that does not fit, one line each."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        shown = [f"  {problem}" for problem in self.problems[:MAX_SHOWN]]
        if len(self.problems) > MAX_SHOWN:
            shown.append(f"  ... and {len(self.problems) - MAX_SHOWN} more")
        super().__init__("\n".join([message, *shown]))


@dataclass(frozen=True)
class Parameter:
    """One name of one parameter. A parameter with several names has an entry for each; the first is the owner."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    owner: str = ""  # the first name of the same tensor; "" where this is the only one or the first
    module: str = ""  # class of the module that holds it, "" where unknown

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Variant:
    """The same model with a key of its configuration changed, or two where one alone is refused: what shapes then are,
    by the name of a parameter or buffer.
    """

    keys: tuple[str, ...]
    values: Mapping[str, int]  # of every integer key
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Switch:
    """A yes/no key of the configuration, and what the model loses or gains when it is turned over."""

    key: str
    value: bool
    default: bool  # of the configuration's class
    gone: frozenset[str]  # parameter names that exist only as it is
    added: Mapping[str, tuple[int, ...]]  # biases that exist only when it is turned over, and their shapes
    untied: frozenset[str]  # names that own a tensor of their own when it is turned over
    tied: Mapping[str, str]  # names that are tied when it is turned over, and to which
    harmless: bool  # nothing else changes: no other new parameter, no other shape


@dataclass(frozen=True)
class Pass:
    """What one backward pass showed. Names are owners' names."""

    order: tuple[str, ...]  # parameters in the order in which their gradients were complete
    uses: Mapping[str, int]  # contributions to each gradient
    products: frozenset[str]  # gradients that one matrix product writes whole
    absent: frozenset[str]  # trainable parameters that got no gradient
    inputs: str  # what the model was given, in words


@dataclass(frozen=True)
class Facts:
    """A model, as far as its gradients go."""

    model: str  # an id
    summary: str
    parameters: tuple[Parameter, ...]  # in the order of named_parameters()
    buffers: tuple[Parameter, ...] = ()  # persistent ones
    values: Mapping[str, int] = field(default_factory=dict)  # integer keys of the configuration
    defaults: Mapping[str, int] = field(
        default_factory=dict
    )  # values of keys that the configuration leaves to its class
    variants: tuple[Variant, ...] = ()
    unknown: frozenset[str] = frozenset()  # keys that could not be varied
    switches: tuple[Switch, ...] = ()
    model_type: str = ""
    preset: str = ""
    backward: Pass | None = None
    no_backward: str = ""  # why there is none
    notes: tuple[str, ...] = ()  # findings so far, for the head of the spec

    @property
    def owners(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if not p.owner)


def refuse_odd(parameters: Sequence[Parameter]) -> None:
    """Raises InferError for what no spec of any model could hold."""
    if not parameters:
        raise InferError("the model has no parameters, so there are no gradients to manage")
    seen: set[str] = set()
    problems = []
    for parameter in parameters:
        if parameter.name in seen:
            problems.append(f"{parameter.name}: two parameters have this name")
        seen.add(parameter.name)
        if len(parameter.shape) > 5:
            problems.append(
                f"{parameter.name}: has {len(parameter.shape)} dimensions; a weight has at most 5"
            )
    if problems:
        raise InferError("the model has parameters that a spec cannot hold", problems)
