"""The demo's worker processes, seen from their parent.

Rules of this module:

1. A signal goes to a process that this object started and has not yet seen end.
2. `end` ends it whatever state it is in, frozen included, and returns when it is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .worker import Setup


class WorkerFailed(RuntimeError):
    """A worker could not do what it was told; the message says what it said."""


class WorkerProcess:
    """One worker, started: `ask` it for one step at a time, `freeze`, `resume` and `end` it."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.name = setup.name
        self._log = folder / f"{setup.name}.log"
        self._buffer = b""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # The modules that we see, and none that happen to lie in the user's folder.
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            )
        self._send(json.dumps(asdict(setup)))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ready(self) -> None:
        """Return when it has started."""
        self._reports(20.0)

    def ask(self, command: str, timeout: float = 20.0) -> list[dict[str, Any]]:
        """Have one step done; its reports in order. Raises `WorkerFailed`."""
        self._send(command)
        return self._reports(timeout)

    def freeze(self) -> None:
        """Stop it in its tracks (SIGSTOP); returns when it has stopped."""
        self._signal(signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise WorkerFailed(f"worker {self.name} ended instead of freezing{self._said()}")

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def end(self, patience: float = 0.0) -> None:
        """End it, also a frozen one; it gets `patience` seconds to leave by itself."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                self._signal(signal.SIGCONT)
            process.wait()
        finally:
            process.stdout.close()

    def _signal(self, number: int) -> None:
        self._process.send_signal(number)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise WorkerFailed(f"worker {self.name} has ended{self._said()}") from None

    def _reports(self, timeout: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        until = time.monotonic() + timeout
        while True:
            report = json.loads(self._line(until))
            if report["what"] == "end":
                return found
            if report["what"] == "error":
                raise WorkerFailed(f"worker {self.name} could not go on: {report['text']}")
            found.append(report)

    def _line(self, until: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise WorkerFailed(f"worker {self.name} did not answer in time{self._said()}")
            more = os.read(self._process.stdout.fileno(), 65536)
            if not more:
                raise WorkerFailed(f"worker {self.name} has ended{self._said()}")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _said(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return "".join(f"\n  {line}" for line in lines[-5:])
