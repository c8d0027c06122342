"""A running PostgreSQL: its processes, whether it is ready, and what a crash of it leaves.

Rules of this module:

1. A child is signalled while the postmaster is stopped. It cannot reap anything then, so the
   child's id is nobody else's.
2. A server counts as ready when its own pid file says so and its port serves: another program may
   have taken the port in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path

from ._process import HOST, OwnProcess, ServerNotRunning

# Lines of the pid file, from 0; the last tells what the postmaster is doing.
_PID, _SHARED_MEMORY, _STATUS = 0, 6, 7


class PostgresProcess(OwnProcess):
    """A postmaster that we started, and its children, which are hurt together."""

    def freeze(self) -> None:
        super().freeze()
        self._signal_children(signal.SIGSTOP, "TtZX")

    def resume(self) -> None:
        if self.frozen:
            self._signal_children(signal.SIGCONT)
        super().resume()

    def kill(self) -> None:
        super().freeze()
        self._signal_children(signal.SIGKILL, "ZX")
        super().kill()

    def end(self, number: int) -> None:
        with contextlib.suppress(ServerNotRunning):
            if number != signal.SIGKILL:
                if self.frozen:
                    self.resume()
                for attempt in (number, signal.SIGQUIT):
                    self.signal(attempt)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._popen.wait(5)
                        return
            self.kill()

    def _signal_children(self, number: int, until: str = "") -> None:
        """Signal them all, and wait for their states to be among these."""
        for child in children(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        end = time.monotonic() + 2
        while until and time.monotonic() < end:
            if all(state in until for state in children(self.pid).values()):
                return
            time.sleep(0.001)


def children(parent: int) -> dict[int, str]:
    """The children of a process, and the letter of each one's state."""
    if Path("/proc/self/stat").exists():
        rows = [_stat(name) for name in os.listdir("/proc") if name.isdigit()]
    else:
        command = ["ps", "-A", "-o", "pid=,ppid=,stat="]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in listed.splitlines()]
    return {int(row[0]): row[2][0] for row in rows if len(row) > 2 and int(row[1]) == parent}


def _stat(pid: str) -> list[str]:
    """The process's id, its parent's and its state; nothing if it ended in between."""
    try:
        status = Path("/proc", pid, "stat").read_text(errors="replace")
    except OSError:
        return []
    state, parent, *_ = status.rpartition(")")[2].split()  # before it: a name, with spaces even
    return [pid, parent, state]


def is_ready(data: Path, pid: int) -> bool:
    """Whether process `pid` has the data folder and takes connections on its port."""
    lines = _pid_file(data)
    return len(lines) > _STATUS and lines[_PID] == str(pid) and lines[_STATUS] == "ready"


def serves(port: int, timeout: float) -> bool:
    """Whether a PostgreSQL server on `port` lets the user postgres in."""
    names = b"user\0postgres\0database\0postgres\0\0"
    startup = struct.pack("!ii", len(names) + 8, 3 << 16) + names  # protocol 3.0
    goodbye = b"X" + struct.pack("!i", 4)
    try:
        with (
            socket.create_connection((HOST, port), timeout) as connection,
            connection.makefile("rb") as replies,
        ):
            connection.sendall(startup + goodbye)
            return replies.read()[:1] == b"R"  # the request for a password, or that none is needed
    except OSError:
        return False


def drop_shared_memory(data: Path) -> None:
    """Remove the kernel's record of a server that crashed, which a folder's removal leaves."""
    lines = _pid_file(data)  # a server that shut down has removed both
    if len(lines) > _SHARED_MEMORY and lines[_SHARED_MEMORY]:
        ctypes.CDLL(None).shmctl(int(lines[_SHARED_MEMORY].split()[1]), 0, None)  # IPC_RMID


def _pid_file(data: Path) -> list[str]:
    try:
        return [line.strip() for line in (data / "postmaster.pid").read_text().splitlines()]
    except OSError:
        return []
