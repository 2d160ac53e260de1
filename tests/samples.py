"""Models built by hand, for tests that say exactly what a model holds, or hold what no spec file may."""

from __future__ import annotations

from typing import Any

from gradgen.expr import Bool, Expr, Num, parse
from gradgen.model import (
    Backward,
    Block,
    Dim,
    Flag,
    Model,
    Place,
    Preset,
    Requirement,
    Shard,
    Strategy,
    Tie,
    Weight,
)

ALWAYS = Bool(True)


def place(line: int = 1) -> Place:
    return Place("/elsewhere/specs/tiny.yaml", line, 3)


def expression(value: str | Expr | None) -> Expr | None:
    return parse(value) if isinstance(value, str) else value


def weight(
    id: str,
    *shape: str,
    zero: str | Expr | None = None,
    line: int = 30,
    name: str | None = None,
    **facts: Any,
) -> Weight:
    if "uses" in facts:
        facts["uses"] = Num(facts["uses"])
    for key in ("when", "trainable"):
        facts[key] = expression(facts.get(key))
    extents = tuple(parse(extent) for extent in shape)
    return Weight(
        id, extents, id + ".weight" if name is None else name, expression(zero), place(line), **facts
    )


def block(id: str, count: str, *weights: Weight, name: str | None = None, uses: int | None = None) -> Block:
    return Block(
        id,
        parse(count),
        f"{id}.{{i}}" if name is None else name,
        weights,
        place(24),
        None if uses is None else Num(uses),
    )


def strategies() -> tuple[Strategy, ...]:
    rows = (
        ("unsharded", "full", "full", "reduce_scatter"),
        ("sharded", "sharded", "full", "reduce_scatter"),
        ("sharded_all_to_all", "sharded", "full", "all_to_all"),
        ("replicated", "full", "full", "all_reduce"),
        ("fully_sharded", "sharded", "sharded", "all_to_all"),
    )
    return tuple(Strategy(*row, place(42 + i)) for i, row in enumerate(rows))


def model(weights: tuple[Weight, ...] = (), blocks: tuple[Block, ...] = (), **parts: Any) -> Model:
    order = [Backward(item.id, (), place(40)) for item in reversed(weights)]
    order += [Backward(None, (item.id,), place(40)) for item in reversed(blocks)]
    defaults: dict[str, Any] = {
        "name": "tiny",
        "summary": "A tiny decoder",
        "dims": (
            Dim("vocab", "vocab_size", None, place(5)),
            Dim("hidden", None, None, place(6)),
            Dim("layers", None, None, place(7)),
        ),
        "flags": (),
        "require": (),
        "presets": (),
        "backward": tuple(order),
        "strategies": strategies(),
        "file": "/elsewhere/specs/tiny.yaml",
    }
    return Model(**{**defaults, "weights": weights, "blocks": blocks, **parts})


def tiny() -> Model:
    """A decoder with everything: ties, conditions, rows, whole, absent and frozen weights, two stacks."""
    dims = (
        *(
            Dim(name, None, None, place(5 + i))
            for i, name in enumerate(("vocab", "hidden", "layers", "heads"))
        ),
        Dim("kv_heads", None, parse("heads"), place(9)),
        Dim("head_dim", None, parse("hidden // heads"), place(10)),
    )
    weights = (
        weight("embedding", "vocab", "hidden", zero="not tied", line=20),
        weight("lm_head", "vocab", "hidden", line=21, tied_to=Tie("embedding", parse("tied"), place(21))),
        weight("final_norm", "hidden", zero=ALWAYS, line=22),
        weight("position", "64", "hidden", line=23, trainable="false", name="pos"),
        weight("scale", line=24, zero=ALWAYS, uses=2),
    )
    decoder = block(
        "decoder",
        "layers",
        weight("input_norm", "hidden", zero=ALWAYS),
        weight("q_proj", "heads * head_dim", "hidden"),
        weight("q_bias", "heads * head_dim", zero=ALWAYS, when="bias and not tied"),
        weight("kv_proj", "2 * kv_heads * head_dim", "hidden", shard=Shard("rows", 2)),
        weight("expert", "4", "hidden", may_be_absent=True),
        weight("router", "hidden", shard=Shard("whole")),
    )
    return model(
        weights,
        (decoder, block("mtp_head", "2", weight("up", "ceil_div(vocab, 3)", "max(hidden, 4)"), uses=2)),
        dims=dims,
        flags=(Flag("tied", None, False, place(13)), Flag("bias", None, None, place(14))),
        require=(
            Requirement(parse("heads % kv_heads == 0 or tied"), "each KV head serves whole heads", place(16)),
        ),
        presets=(
            Preset(
                "small", (("vocab", 7), ("hidden", 6), ("layers", 3), ("heads", 2), ("bias", True)), place(18)
            ),
        ),
        backward=tuple(
            Backward(item, (), place(40))
            if item not in ("decoder", "mtp_head")
            else Backward(None, (item,), place(40))
            for item in ("lm_head", "final_norm", "mtp_head", "decoder", "position", "scale", "embedding")
        ),
    )
