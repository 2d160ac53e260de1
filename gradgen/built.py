"""A built model: its native module, its folder, and its configuration class.

A generated package imports this; nothing here imports yaml, jinja2, jsonschema or torch.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gradgen.model import Model


class Package(NamedTuple):
    """A built model: its native module and the folder that holds its text."""

    native: Any
    folder: Path
    runtime: Any

    def model(self) -> Model:
        return _model(self.folder)


@lru_cache(maxsize=64)
def _model(folder: Path) -> Model:
    from gradgen.serialize import model_from_json

    return model_from_json((folder / "model.json").read_text(encoding="utf-8"))


class BaseConfig:
    """Dimensions and flags of a model, keyword-only. Defaults are filled in and requirements checked by the constructor."""

    _package: Package

    @classmethod
    def preset(cls, name: str, **changes: int | bool) -> Any:
        """A published size, with some values changed. Raises UsageError that lists the presets."""
        from gradgen.configure import preset

        return cls(**{**preset(cls._package.model(), name), **changes})

    @classmethod
    def from_hf(cls, config: Any, **changes: int | bool) -> Any:
        """From a transformers configuration (or a dict with its keys). Raises ConfigError that names the keys it lacks."""
        from gradgen.configure import from_hf, missing_hf

        model = cls._package.model()
        values = {**from_hf(model, config), **changes}
        missing = missing_hf(model, values)
        if missing:
            from gradgen.diagnostics import ConfigError

            raise ConfigError(
                f"{model.name}: the configuration does not have {', '.join(missing)}; is it of another architecture? "
                "What it lacks can be passed beside it: from_hf(config, dim=value)"
            )
        return cls(**values)

    if TYPE_CHECKING:  # the native class has it

        def values(self) -> dict[str, int]: ...

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{k}={v}' for k, v in self.values().items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.values() == other.values()

    def __hash__(self) -> int:
        return hash(tuple(self.values().items()))


def typed_values(package: Package, config: Any) -> dict[str, int | bool]:
    """Values with flags as bools, as the planner wants them."""
    flags = {flag.name for flag in package.model().flags}
    return {name: bool(value) if name in flags else value for name, value in config.values().items()}
