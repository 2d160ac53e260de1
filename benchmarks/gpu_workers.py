"""Groups of rank processes that answer commands, for the GPU benchmarks. Knows nothing of torch."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """This checkout first; NVLink multicast stays off, since it needs a fabric manager that a shared host may lack."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0",
        **more,
    }


def gpu_count() -> int:
    """GPUs that nvidia-smi lists; 0 where there is none."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.split("\n")[0].strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def gpu_gib() -> float:
    """Memory of the first GPU; 0 where there is none."""
    try:
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        text = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
        return int(text.split("\n")[0]) / 1024
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0.0


class Group:
    """`world` processes of one script. They import torch at once, so starting several groups costs one start."""

    def __init__(self, script: str, arguments: list[str], world: int = 1, **more: str) -> None:
        self.name = " ".join([script, *arguments])
        self._folder = tempfile.TemporaryDirectory()
        self._logs, self._answers, self._processes = [], [], []
        port = str(free_port())
        for rank in range(world):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            log = Path(self._folder.name, f"log{rank}")
            with log.open("w") as stream:
                process = subprocess.Popen(
                    [sys.executable, str(HERE / script), *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stream,
                    text=True,
                    env=environment(
                        MASTER_ADDR="127.0.0.1",
                        MASTER_PORT=port,
                        **{key: str(value) for key, value in names.items()},
                        **more,
                    ),
                )
            answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
            threading.Thread(target=self._listen, args=(process, answers), daemon=True).start()
            self._logs.append(log)
            self._answers.append(answers)
            self._processes.append(process)
        self._ready = False

    @staticmethod
    def _listen(process: subprocess.Popen[str], answers: queue.Queue[dict[str, Any] | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("@"):
                answers.put(json.loads(line[1:]))
            else:
                print(line, end="", file=sys.stderr)
        answers.put(None)  # it has ended

    def _collect(self, command: str, deadline: float) -> list[dict[str, Any]]:
        replies = []
        for answers in self._answers:
            try:
                reply = answers.get(timeout=max(deadline - time.monotonic(), 0.1))
            except queue.Empty:
                raise self._error(f"no answer to {command!r} in time") from None
            if reply is None:
                raise self._error(f"a rank ended in {command!r}")
            replies.append(reply)
        return replies

    def _error(self, why: str) -> RuntimeError:
        self.kill()
        tails = [f"rank {r}: {log.read_text()[-3000:]}" for r, log in enumerate(self._logs)]
        return RuntimeError(f"{self.name}: {why}\n" + "\n".join(tails))

    def ask(self, command: str, timeout: float = 120) -> list[dict[str, Any]]:
        """Every rank's answer. Raises RuntimeError with the ends of their logs."""
        deadline = time.monotonic() + timeout
        if not self._ready:
            self._collect("start", deadline)
            self._ready = True
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(command + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._error(f"a rank ended before {command!r}") from None
        return self._collect(command, deadline)

    def end(self) -> None:
        try:
            self.ask("end", 30)
            for process in self._processes:
                process.wait(30)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{self.name}: did not end cleanly: {error}", file=sys.stderr)
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
