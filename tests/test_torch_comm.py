"""The torch.distributed transport: collectives on plain buffers, group errors, a lost peer."""

from __future__ import annotations

import pytest
from torch_ranks import run_ranks

from gradgen.comm_torch import _classify, default_group_info
from gradgen.diagnostics import CommError, CommTimeout, PeerLost, StateError


def test_collectives_on_buffers() -> None:
    for rank, result in enumerate(run_ranks(3, "torch_scenarios:transport")):
        assert result["all_to_all"] == [10 * r + rank for r in range(3) for _ in range(3)]
        assert result["all_gather"] == [r for r in range(3) for _ in range(5)]
        assert result["objects"] == [0, 1, 2]
        assert result["info"] == [rank, 3, "gloo", 1800.0]
        assert result["done"] is True
        assert (
            result["member"] == "no error" if rank == 0 else result["member"].startswith("ValueError: rank")
        )
        assert result["gone"].startswith("CommError: the process group has been destroyed")
        assert "output of 7 bytes and input of 3 bytes do not fit 3 ranks" in result["sizes"]


def test_a_lost_peer_is_named_at_once_and_remembered() -> None:
    survivor = run_ranks(2, "torch_scenarios:lost_peer", codes=(0, 7))[0]
    assert survivor["first"].startswith("PeerLost: gather_objects on rank 0 of 2 (gloo)"), survivor
    assert survivor["again"].startswith(
        "PeerLost: barrier: the process group failed before: gather_objects"
    ), survivor
    assert survivor["seconds"] < 5


def test_no_default_group_says_how_to_make_one() -> None:
    with pytest.raises(StateError, match=r"init_process_group\('gloo'\)"):
        default_group_info()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "[pair.cc:537] Read error [127.0.0.1]:8864: Connection reset by peer. This is typically ...",
            PeerLost,
        ),
        ("[unbound_buffer.cc:84] Timed out waiting 1000ms for recv operation to complete", CommTimeout),
        ("something else", CommError),
    ],
)
def test_torch_messages_become_named_errors(text: str, kind: type) -> None:
    found, sentence = _classify(text)
    assert found is kind
    assert ".cc" not in sentence and "typically" not in sentence
