"""From a config.json to a class of the installed transformers. What asks for code of its own is refused."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradgen.diagnostics import UsageError, quote
from gradgen.infer_facts import InferError

MAX_CONFIG = 8 << 20


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a config.json. Raises UsageError for what is none."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path}: is not a regular file")
        if status.st_size > MAX_CONFIG:
            raise UsageError(f"{path}: has {status.st_size} bytes; a configuration has at most {MAX_CONFIG}")
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot read it: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: is not JSON") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: holds no JSON object, so it is no transformers configuration")
    return data


def import_transformers() -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"a transformers configuration needs the packages torch and transformers ({error}); "
            "pip install torch transformers"
        ) from None
    return transformers


def class_for(data: Mapping[str, Any]) -> tuple[Any, Any]:
    """The model class and the configuration object. Raises InferError for classes that transformers does not have."""
    transformers = import_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(data.get("model_type", ""))
    wanted = data.get("architectures")
    names = [str(name) for name in wanted] if isinstance(wanted, list) else []
    version = transformers.__version__
    if kind not in CONFIG_MAPPING:
        if data.get("auto_map"):
            raise InferError(
                f"the configuration asks for code of its own (auto_map) and transformers {version} has no model type "
                f"{quote(kind)}; gradgen runs no remote code: import the model yourself and pass "
                "package.module:factory, or call gradgen.infer(module)"
            )
        what = (
            f"no model type {quote(kind)}"
            if kind
            else "the configuration has no model_type, which transformers needs"
        )
        raise InferError(f"transformers {version}: {what}; a newer version may have it")
    classes = [getattr(transformers, name, None) for name in names]
    cls = next((c for c in classes if c is not None and hasattr(c, "config_class")), None)
    if cls is None and names and data.get("auto_map"):
        raise InferError(
            f"the configuration asks for code of its own (auto_map) for {quote(names[0])}, which transformers {version} does "
            "not have; gradgen runs no remote code: import the model yourself and pass package.module:factory"
        )
    if cls is None and names:
        raise InferError(
            f"transformers {version} has no class {quote(names[0])}; a newer version may have it"
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict({k: v for k, v in data.items() if k != "auto_map"})
    except Exception as error:
        raise InferError(f"transformers does not take this configuration: {said(error)}") from None
    return cls or _default_class(type(config), kind), config


def _default_class(config_class: type, kind: str) -> Any:
    """What a configuration without `architectures` most likely means."""
    from transformers.models.auto import modeling_auto as auto

    for name in (
        "CAUSAL_LM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "MASKED_LM",
        "IMAGE_CLASSIFICATION",
        "CTC",
        "PRETRAINING",
    ):
        mapping = getattr(auto, f"MODEL_FOR_{name}_MAPPING", None)
        if mapping is not None and config_class in mapping:
            return mapping[config_class]
    if config_class in auto.MODEL_MAPPING:
        found = auto.MODEL_MAPPING[config_class]
        return found[0] if isinstance(found, tuple) else found
    raise InferError(f"transformers has no model class for {quote(kind)}; name one under `architectures`")


def said(error: Exception) -> str:
    return quote(f"{type(error).__name__}: {error}".split("\n")[0])[1:-1]
