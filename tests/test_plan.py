"""Plans: the numbers that a manager is held to, their order, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradgen import plan_table
from gradgen.diagnostics import ConfigError, UsageError
from gradgen.model import Model, Shard
from gradgen.plan import Plan, layout_text, plan, verify
from tests import samples

SPECS = Path(__file__).resolve().parent.parent / "specs"
WORLDS = (1, 2, 3, 4, 8)
VALUES: dict[str, int | bool] = {"vocab": 7, "hidden": 6, "layers": 3, "heads": 2, "bias": True}


def tiny(**settings: object) -> Plan:
    return plan(samples.tiny(), values=VALUES, **settings)  # type: ignore[arg-type]


def test_units_are_what_has_gradients() -> None:
    """Frozen weights cost nothing; a tied one is its owner's; what a condition excludes has no slot."""
    assert [arena.id for arena in tiny().arenas] == [
        "embedding",
        "lm_head",
        "final_norm",
        "scale",
        "decoder",
        "mtp_head",
    ]
    tied = plan(samples.tiny(), values={**VALUES, "tied": True})
    assert [arena.id for arena in tied.arenas] == ["embedding", "final_norm", "scale", "decoder", "mtp_head"]
    assert "q_bias" in [slot.id for slot in tiny().arena("decoder").slots]
    assert "q_bias" not in [slot.id for slot in tied.arena("decoder").slots]
    assert (tiny().arena("embedding").zero_numel, tied.arena("embedding").zero_numel) == (64, 0)


def test_order_follows_backward_and_ties() -> None:
    assert tiny().backward == ("lm_head", "final_norm", "mtp_head", "decoder", "scale", "embedding")
    tied = plan(samples.tiny(), values={**VALUES, "tied": True})
    assert tied.backward == ("final_norm", "mtp_head", "decoder", "scale", "embedding")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("ga", (1, 3))
def test_trace_and_table_agree(world: int, ga: int) -> None:
    result = tiny(dp=world, ga=ga)
    for strategy in result.strategies:
        trace = result.trace(strategy.id)
        assert len(trace) == strategy.collectives
        assert sum(entry.bytes for entry in trace) == strategy.wire_bytes
        if world == 1:
            assert trace == () and strategy.receive_bytes == 0


def test_order_of_collectives() -> None:
    """Sharded units in every micro-step, full ones in the last; stacks from their last block."""
    names = [
        (entry.operation, entry.unit, entry.micro_step)
        for entry in tiny(dp=2, ga=2).trace("sharded_all_to_all")
    ]
    stacks = [f"block 'mtp_head' layer {i}" for i in (1, 0)] + [
        f"block 'decoder' layer {i}" for i in (2, 1, 0)
    ]
    first = [("all_to_all", unit, 0) for unit in stacks]
    units = ["weight 'lm_head'", "weight 'final_norm'", *stacks, "weight 'scale'", "weight 'embedding'"]
    assert names == [*first, *(("all_to_all", unit, 1) for unit in units), ("end_step", "tiny", 1)]


def test_all_reduce_gathers_after_it_reduced() -> None:
    trace = tiny(dp=2, ga=2).trace("replicated")
    reduced = [entry for entry in trace if entry.operation == "all_reduce"]
    gathered = [entry for entry in trace if entry.operation == "all_gather"]
    assert [entry._replace(operation="all_gather") for entry in reduced] == gathered
    assert trace == (*reduced, *gathered, trace[-1])
    assert {entry.micro_step for entry in trace} == {1}


def two_blocks() -> Model:
    """A block of 4096 elements, twice, and a weight of 128: bytes that can be counted by hand."""
    return samples.model(
        (samples.weight("head", "128"),), (samples.block("b", "2", samples.weight("w", "4096")),), dims=()
    )


def cost(strategy: str, **settings: object) -> tuple[int, ...]:
    result = plan(two_blocks(), **settings).strategy(strategy)  # type: ignore[arg-type]
    return (
        result.full_bytes,
        result.shard_bytes,
        result.staging_bytes,
        result.receive_bytes,
        result.wire_bytes,
    )


def test_bytes_by_hand() -> None:
    """full, shards, staging, receive, sent."""
    full = 4 * (2 * 4096 + 128)
    assert cost("unsharded") == (full, 0, 0, 0, 0)
    assert cost("sharded") == (full, 0, 0, 0, 0)
    assert cost("unsharded", dp=2, transport="threads") == (full, 0, 0, 0, full // 2)
    assert cost("unsharded", dp=2) == (full, 0, 0, 2 * 2048 * 4, full // 2)
    # Sharded: shards of both blocks, two slots for whole blocks, receive staging for each and one more.
    sent = 3 * 2 * 2048 * 4 + 64 * 4
    expected = (512, 2 * 2048 * 4, 2 * 4096 * 4, 3 * 2 * 2048 * 4, sent)
    assert cost("sharded", dp=2, ga=3) == expected
    assert cost("sharded", dp=2, ga=3, block_buffers=9) == expected
    assert cost("sharded", dp=2, ga=3, block_buffers=1, transport="shared")[2:4] == (4096 * 4, 0)
    assert cost("fully_sharded", dp=2)[:2] == (0, 4 * (2 * 2048 + 64))


def test_bytes_of_three_dtypes() -> None:
    """bf16 produced, fp32 sums: what is staged is bf16, what is kept fp32; the wire follows what is sent."""
    mixed = {"dtype": "bfloat16", "accumulator": "float32", "dp": 2}
    assert cost("unsharded", **mixed)[:3] == (4 * (2 * 4096 + 128), 0, 2 * (2 * 4096 + 128))
    assert cost("sharded", **mixed)[:3] == (4 * 128, 4 * 2 * 2048, 2 * (2 * 4096 + 128))
    assert cost("sharded", **mixed)[4] == 2 * 2 * 2048 + 4 * 64
    assert cost("sharded", dtype="bfloat16", rounding="stochastic")[2] == 2 * (2 * 4096 + 128)
    assert cost("sharded", dtype="bfloat16")[2] == 0
    narrow = cost("sharded", dtype="float32", wire="bfloat16", dp=2)
    assert narrow[4] == 2 * (2 * 2048 + 64)
    assert (
        narrow[3] == 2 * 2 * (2 * 2048 * 2) + 2 * 2 * 2048 * 2
    )  # two slots and the shared one, receiving and sending


def test_rows_need_a_send_buffer() -> None:
    rows = samples.model(
        (), (samples.block("b", "2", samples.weight("w", "8", "64", shard=Shard("rows", 2))),), dims=()
    )
    flat = samples.model((), (samples.block("b", "2", samples.weight("w", "8", "64")),), dims=())
    sizes = [plan(model, dp=2).strategy("sharded").receive_bytes for model in (rows, flat)]
    assert sizes == [2 * 256 * 4 * (2 + 2 + 1), 2 * 256 * 4 * (2 + 1)]


def test_a_model_costs_by_kinds_not_layers() -> None:
    assert [arena.count for arena in plan(SPECS / "llama.yaml", preset="llama-3.1-405b", dp=8).arenas] == [
        1,
        1,
        1,
        126,
    ]


def test_sharded_peak_grows_by_shards_alone() -> None:
    """Contract 13: what more layers add is their shards."""
    costs = [plan(samples.tiny(), values={**VALUES, "layers": n}, dp=4, strategy="sharded") for n in (4, 5)]
    more = costs[1].strategy().memory_bytes - costs[0].strategy().memory_bytes
    assert more == 4 * costs[0].arena("decoder").shard_numel


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dp": 0}, "dp must be a positive integer, not 0"),
        ({"ga": True}, "ga must be a positive integer, not True"),
        ({"dtype": "int8"}, "dtype must be one of float32, float64, bfloat16, float16, not 'int8'"),
        ({"rounding": "up"}, "rounding must be one of nearest, stochastic, not 'up'"),
        ({"transport": "mail"}, "transport must be one of single, threads, shared, group, nccl, not 'mail'"),
        (
            {"rounding": "stochastic"},
            "stochastic rounding needs a bfloat16 or float16 accumulator, not float32",
        ),
        (
            {"dtype": "bfloat16", "wire": "float32"},
            "the wire dtype float32 is not narrower than what is sent, bfloat16",
        ),
        (
            {"strategy": "sharedd"},
            "tiny has no strategy 'sharedd'; it has unsharded, sharded, sharded_all_to_all",
        ),
    ],
)
def test_refusals_say_what_is_allowed(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        tiny(**settings)
    assert str(caught.value).startswith(message)


def test_a_configuration_is_needed() -> None:
    with pytest.raises(UsageError, match="tiny needs a preset or values of its dims; presets: small"):
        plan(samples.tiny())
    with pytest.raises(UsageError, match="has no preset"):
        plan(samples.tiny(), preset="smal")
    with pytest.raises(ConfigError, match="each KV head serves whole heads"):
        plan(samples.tiny(), preset="small", values={"kv_heads": 3})
    assert plan(samples.tiny(), preset="small", values={"layers": 9}).arena("decoder").count == 9


def test_unknown_unit() -> None:
    with pytest.raises(
        UsageError, match="tiny has no weight or block 'position' with gradients; it has embedding, lm_head"
    ):
        plan_table.block_table(tiny(), "position")


def test_json_is_plain_and_says_its_scope() -> None:
    data = json.loads(json.dumps(tiny(dp=2).to_json()))
    assert data["scope"] == "gradients only"
    assert data["values"]["bias"] is True
    assert data["arenas"][0]["padding"] == 128 - 42
    assert data["strategies"][1]["memory_bytes"] == tiny(dp=2).strategy("sharded").memory_bytes


def test_tables() -> None:
    result = plan(two_blocks(), dp=2, ga=2, strategy="sharded")
    assert plan_table.table(result) == (
        "tiny: gradients only, 2 ranks, 2 micro-steps, float32 into float32 (nearest), group\n"
        "\n"
        "unit   count  weights  elements  padding  zeroed  bytes each     bytes\n"
        "head       1        1       128        0       0       512 B     512 B\n"
        "b          2        1      4096        0       0    16.0 KiB  32.0 KiB\n"
        "total                      8320                               32.5 KiB\n"
        "\n"
        "strategy  blocks   others   full    shards   staging   receive    memory  sent a step  collectives\n"
        "sharded   sharded  full    512 B  16.0 KiB  32.0 KiB  48.0 KiB  96.5 KiB     32.2 KiB            6\n"
    )
    assert plan_table.block_table(tiny(dp=2), "decoder") == (
        "tiny block decoder x 3: gradients only, 2 ranks, 1 micro-step, "
        "float32 into float32 (nearest), group\n"
        "arena 448 elements, 1.8 KiB; zeroed [0, 192)\n"
        "flat [0, 256), 128 a rank; shard 256\n"
        "\n"
        "weight      shape    shard    offset  elements  bytes  padding  zeroed\n"
        "input_norm  [6]      flat          0         6     24       58     yes\n"
        "q_bias      [6]      flat         64         6     24       58     yes\n"
        "expert      [4, 6]   flat        128        24     96       40     yes\n"
        "q_proj      [6, 6]   flat        192        36    144       28      no\n"
        "kv_proj     [12, 6]  rows(2)     256        72    288       56      no\n"
        "router      [6]      whole       384         6     24       58      no\n"
    )


def test_verify_names_the_broken_invariant() -> None:
    result = tiny(dp=2)
    with pytest.raises(AssertionError, match="internal error: the order of weight 'embedding' does not name"):
        verify(replace(result, order=result.order[:1]))
    arena = replace(result.arenas[0], zero_numel=0)
    with pytest.raises(AssertionError, match="embedding is on the wrong side of the zero range"):
        verify(replace(result, arenas=(arena, *result.arenas[1:])))


def test_layout_text_leaves_out_what_has_no_storage() -> None:
    text = layout_text(tiny(dp=2))
    assert text.startswith(
        "world 2\nweight embedding arena 128 zero 64 flat 0 64 shard 64\n  embedding 0 42\n"
    )
    assert "position" not in text and "block mtp_head count 2" in text


def test_offload_moves_block_shards_to_the_host() -> None:
    """What the GPU loses the host gains, but for two buffers on the way."""
    for world in (1, 4):
        device, host = (
            tiny(dp=world, transport="nccl", offload=offload).strategy("sharded") for offload in (False, True)
        )
        kept = 4 * sum(
            a.count * (a.numel if world == 1 else a.shard_numel)
            for a in tiny(dp=world).arenas
            if a.kind == "block"
        )
        largest = 4 * max(
            (a.numel if world == 1 else a.shard_numel) for a in tiny(dp=world).arenas if a.kind == "block"
        )
        assert device.pinned_bytes == 0 and host.pinned_bytes == kept > 0
        assert (device.full_bytes + device.shard_bytes) - (host.full_bytes + host.shard_bytes) == kept
        staged = (
            0
            if world > 1
            else 4 * sum(sorted((a.numel for a in tiny().arenas if a.kind == "block"), reverse=True)[:1]) * 2
        )
        assert host.staging_bytes - device.staging_bytes == 2 * largest + staged


def test_offload_of_whole_blocks_is_not_planned() -> None:
    assert {s.id for s in tiny(dp=2, offload=True).strategies} < {s.id for s in tiny(dp=2).strategies}
    with pytest.raises(UsageError, match="offload keeps shards of blocks"):
        tiny(dp=2, offload=True, strategy="unsharded")


def test_nccl_receives_only_what_it_cannot_sum_in_place() -> None:
    """A reduce-scatter leaves its sum in the arena; slices that our kernel sums, or that must be packed, need room."""
    mini = Path(__file__).parent / "specs" / "mini.yaml"

    def receives(strategy: str, **settings: Any) -> int:
        values = {"hidden": 6, "vocab": 7, "layers": 3}
        return plan(mini, values=values, dp=4, **settings).strategy(strategy).receive_bytes

    assert receives("sharded", transport="nccl") == receives("replicated", transport="nccl") == 0
    assert receives("fully_sharded", transport="nccl") == receives("fully_sharded", transport="group") > 0
    assert receives("sharded", transport="nccl", wire="bfloat16") > 0
    assert tiny(dp=4, transport="nccl").strategy("sharded").receive_bytes > 0  # it has row shards
