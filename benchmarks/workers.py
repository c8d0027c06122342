"""Worker processes: started in an environment, asked one thing at a time, ended by their id."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from typing import Any

from benchmarks.environments import CONTENDERS, ENVIRONMENTS, HERE

PATIENCE = 120.0


class WorkerError(Exception):
    """What a worker answered instead of a value, or why it does not answer."""


class Worker:
    """A process of an environment. Close it, or use it as a context manager."""

    def __init__(self, environment: str, *flags: str) -> None:
        where = ENVIRONMENTS[environment]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - close() ends it
        self._buffer = b""
        self._process = subprocess.Popen(
            [str(where.python), str(HERE / "child" / "worker.py"), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            cwd=tempfile.gettempdir(),
            env=where.variables(),
            # Ctrl-C is for the parent, which ends its workers.
            start_new_session=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def open(self, contender: str, **arguments: Any) -> None:
        """Choose what is measured; the answer is to be received."""
        self.send(open=CONTENDERS[contender].where, args=arguments)

    def send(self, **order: Any) -> None:
        """Ask, without waiting for the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise WorkerError(self._last_words()) from None

    def receive(self, patience: float = PATIENCE) -> Any:
        """The answer to what was sent."""
        answer = json.loads(self._line(time.monotonic() + patience))
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["value"]

    def ask(self, call: str, patience: float = PATIENCE, **arguments: Any) -> Any:
        """Call a function on the contender that was opened."""
        self.send(call=call, args=arguments)
        return self.receive(patience)

    def answered(self, within: float) -> bool:
        """Whether there is something to receive."""
        assert self._process.stdout is not None
        return b"\n" in self._buffer or bool(
            select.select([self._process.stdout], [], [], within)[0]
        )

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _line(self, until: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            if not self.answered(max(0.0, until - time.monotonic())):
                self._process.kill()
                raise WorkerError("no answer in time")
            chunk = os.read(self._process.stdout.fileno(), 1 << 20)
            if not chunk:
                raise WorkerError(self._last_words())
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _last_words(self) -> str:
        self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"it ended with status {self._process.returncode}"
