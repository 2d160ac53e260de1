"""Over a process group without shared memory: memory in flight, ranks that do not come, interrupts, and the way out."""

from __future__ import annotations

import signal

import pytest

from tests.support import model
from tests.test_contract_processes import finish, spawn

pytestmark = pytest.mark.slow


def test_a_dropped_manager_leaves_its_memory_to_what_is_in_flight() -> None:
    model()
    ranks = spawn(2, "-m", "tests.group_rank", "adopt")
    texts = finish(ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(texts)


def test_a_rank_that_does_not_come_is_a_timeout() -> None:
    model()
    ranks = spawn(2, "-m", "tests.group_rank", "late")
    text = finish(ranks)[0]
    assert ranks[0].returncode == 0, text
    line = next((line for line in text.splitlines() if line.startswith("LATE ")), "")
    assert line.split()[1] == "CommTimeout", text
    assert float(line.split()[2]) < 6, line
    assert "did not arrive in time" in line
    assert "AGAIN True" in text


def test_an_interrupt_in_the_middle_of_a_step_ends_the_process_cleanly() -> None:
    model()
    ranks = spawn(2, "-m", "tests.group_rank", "interrupted")
    assert ranks[0].stdout is not None
    seen = []
    for line in iter(ranks[0].stdout.readline, ""):
        seen.append(line)
        if "READY" in line:
            ranks[0].send_signal(signal.SIGINT)
            break
    text = "".join(seen) + finish(ranks)[0]
    assert ranks[0].returncode == 0, text
    assert "INTERRUPTED" in text and "AGAIN True" in text, text


def test_the_interpreter_ends_with_exchanges_in_flight() -> None:
    model()
    ranks = spawn(2, "-m", "tests.group_rank", "leaves")
    texts = finish(ranks)
    for rank, text in zip(ranks, texts, strict=True):
        assert rank.returncode == 0, text
        assert "LEAVING" in text and "Fatal" not in text and "Traceback" not in text, text
