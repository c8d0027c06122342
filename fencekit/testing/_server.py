"""What every private server has: a life, a port, a folder, a log, and one process that owns it.

Rules of this module:

1. A signal goes to a process id that this object started and has not yet seen end.
2. What this object made, it removes: the process, its folder, its exit hook.
3. `restart` keeps the port and the data; `stop` ends both.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TypeVar

from ._binary import ServerError
from ._process import HOST, OwnProcess, ServerNotRunning, free_port

Server = TypeVar("Server", bound="PrivateServer")


class PrivateServer(ABC):
    """The life of one server; what differs between kinds is in the methods at its end."""

    external = False
    _clean_end: int = signal.SIGTERM

    def __init__(self, title: str, port: int | None) -> None:
        self.host = HOST
        self._title = title
        self._wanted_port = port
        self._port = port
        self._process: OwnProcess | None = None
        self._owner: int | None = None
        self._private: Path | None = None
        self._last_log = ""

    # -- life ------------------------------------------------------------------------------------

    def start(self: Server, timeout: float = 10.0) -> Server:
        """Start the server and return when it serves; a running one is left as it is."""
        self._require_owner()
        if self.alive:
            return self
        self._owner = os.getpid()
        fresh = self.fresh
        if fresh:
            self._private = self._new_folder()
            self._port = self._wanted_port
        atexit.unregister(self.stop)  # one hook, however often it is restarted
        atexit.register(self.stop)
        try:
            if fresh:
                self._fill(self._folder)
            self._launch(fresh, time.monotonic() + timeout)
        except BaseException:
            self._end(signal.SIGKILL)
            if fresh:
                self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server and remove what it left; calling it again does nothing."""
        if self._owner not in (None, os.getpid()):
            return  # a forked child inherits the exit hook, not the server
        atexit.unregister(self.stop)
        self._end(self._clean_end)
        if self._private is not None:
            self._last_log = self.log()
            self._clear(self._private)
            shutil.rmtree(self._private, ignore_errors=True)
            self._private = None

    def kill(self) -> None:
        """End the server as a crash would (SIGKILL); `restart` brings it back."""
        self._running().kill()

    def freeze(self) -> None:
        """Stop the server in its tracks (SIGSTOP): connections stay open, nothing answers."""
        self._running().freeze()

    def resume(self) -> None:
        """Let a frozen server go on (SIGCONT)."""
        self._running().resume()

    def restart(self: Server, timeout: float = 10.0) -> Server:
        """Start again on the same port with the same data, after `kill` or from running.

        A running server is shut down cleanly first. What was in memory only is gone.
        """
        self._require_owner()
        if self.fresh:
            raise ServerNotRunning("This server was never started, or it was stopped: use start().")
        self._end(self._clean_end)
        return self.start(timeout)

    def __enter__(self: Server) -> Server:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # -- facts -----------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the process exists; a frozen one does."""
        return self._process is not None and self._process.alive

    @property
    def fresh(self) -> bool:
        """Whether there is nothing of it yet: before `start`, and again after `stop`."""
        return self._private is None

    @property
    def frozen(self) -> bool:
        """Whether `freeze` is in effect."""
        return self._process is not None and self._process.frozen and self._process.alive

    @property
    def pid(self) -> int:
        """The process id; raises `ServerNotRunning` when there is no process."""
        return self._running().pid

    @property
    def port(self) -> int:
        """The TCP port; it stays the same over `kill` and `restart`."""
        if self._port is None:
            raise ServerNotRunning("This server has no port yet: start() it first.")
        return self._port

    def log(self) -> str:
        """The end of the server's output without its secrets; after `stop`, as it was then."""
        if self._private is None:
            return self._last_log
        try:
            text = (self._private / "log").read_text(errors="replace")
        except OSError:
            text = ""
        return self._shown(text)[-8000:]

    def __repr__(self) -> str:
        state = "frozen" if self.frozen else "up" if self.alive else "down"
        where = f"{self.host}:{self._port}"
        return f"<{type(self).__name__} {self._title} {where} {state}>"

    # -- inside ----------------------------------------------------------------------------------

    def _launch(self, fresh: bool, end: float) -> None:
        log = self._folder / "log"
        taken = ""
        while True:
            if fresh:
                self._port = self._wanted_port or free_port()
            begun = log.stat().st_size if log.exists() else 0
            self._process = self._spawn(self._folder, fresh)
            try:
                if self._wait_ready(begun, end):
                    return
            except ServerError:
                if taken:  # the time was up in the middle of another try: this is why it was spent
                    raise ServerError(f"{self._title} did not start. It said:\n{taken}") from None
                raise
            said = self._said(begun)
            if "in use" not in said or time.monotonic() >= end:
                raise ServerError(f"{self._title} did not start. It said:\n{said}")
            taken = said
            time.sleep(0.05)  # the port: another one, or the same after its holder has let go

    def _wait_ready(self, begun: int, end: float) -> bool:
        process = self._running()
        while process.alive:
            left = end - time.monotonic()
            if left <= 0:
                raise ServerError(f"{self._title} was not ready in time. It said:\n{self.log()}")
            if self._ready(process.pid, min(0.5, left), begun):
                return True
            time.sleep(0.003)
        return False

    def _said(self, begun: int) -> str:
        """What the log has from that byte on."""
        with (self._folder / "log").open("rb") as file:
            file.seek(begun)
            return self._shown(file.read().decode(errors="replace"))[-4000:]

    @property
    def _folder(self) -> Path:
        assert self._private is not None
        return self._private

    def _require_owner(self) -> None:
        if self._owner not in (None, os.getpid()):
            raise ServerNotRunning("This server belongs to the process that started it.")

    def _running(self) -> OwnProcess:
        self._require_owner()
        if self._process is None:
            raise ServerNotRunning("This server is not running: start() it first.")
        return self._process

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.end(number)
            self._process = None

    # -- what kinds of servers differ in ---------------------------------------------------------

    @abstractmethod
    def _new_folder(self) -> Path:
        """A folder for this server alone."""

    def _fill(self, private: Path) -> None:  # noqa: B027
        """Put into a new folder what a server needs there before its first start."""

    def _clear(self, private: Path) -> None:  # noqa: B027
        """Undo what the removal of the folder would leave; the process has ended."""

    @abstractmethod
    def _spawn(self, private: Path, fresh: bool) -> OwnProcess:
        """Start the process on `self.port`."""

    @abstractmethod
    def _ready(self, pid: int, timeout: float, begun: int) -> bool:
        """Whether process `pid` serves; what it has said so far is in the log from `begun` on."""

    def _shown(self, text: str) -> str:
        """Text from the log without secrets."""
        return text
