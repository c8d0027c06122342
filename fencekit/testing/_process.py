"""What a server process needs around it: a port, a configuration file, a proof of readiness.

Rules of this module:

1. A secret is written into the configuration file only; it never becomes an argument.
2. A signal goes to a process id that this process started and has not yet seen end.
3. A server counts as ready only when the process that answers is the one that was started:
   another program may have taken the port in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ._account import Account, as_account
from ._binary import ServerError

HOST = "127.0.0.1"

# Below the ports that kernels hand to outgoing connections (from 32768 on Linux), the cluster
# bus (port + 10000) included. A client that keeps calling a dead server's port would otherwise
# now and then connect to itself and hold the port.
_PORTS = (12000, 22700)

# Not the module's shared generator: test runners seed that one, and then two runs draw the same.
_random = random.SystemRandom()

_SECRET_LINE = re.compile(r"\b(requirepass|masterauth|auth-pass|user)\b.*", re.IGNORECASE)


def free_port() -> int:
    """A port that nothing listens on now; the caller retries if somebody is faster."""
    for _ in range(1000):
        port = _random.randrange(*_PORTS)
        try:
            for number in (port, port + 10000):
                with socket.socket() as probe:
                    probe.bind((HOST, number))
        except OSError:
            continue
        return port
    raise OSError("no free port found")


def quoted(value: str) -> str:
    """A value as one argument of a line in a server's configuration file."""
    plain = (chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\x{b:02x}" for b in value.encode())
    return '"' + "".join(plain) + '"'


def write_private(path: Path, lines: Iterable[str]) -> None:
    """Write a file that only its owner can read, whatever the umask is."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


class ServerNotRunning(ServerError):
    """The server was not started, has ended, or belongs to another process."""


class OwnProcess:
    """A process that we started, and may therefore signal."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self._owner = os.getpid()
        self.frozen = False

    @property
    def ours(self) -> bool:
        """False in a forked child, which must leave its parent's server alone."""
        return self._owner == os.getpid()

    @property
    def alive(self) -> bool:
        return self.ours and self._popen.poll() is None

    @property
    def pid(self) -> int:
        return self._popen.pid

    def signal(self, number: int) -> None:
        if not self.ours:
            raise ServerNotRunning("This server belongs to the process that started it.")
        if self._popen.poll() is not None:
            raise ServerNotRunning("This server has ended: restart() it first.")
        self._popen.send_signal(number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)
        self.frozen = True
        end = time.monotonic() + 2
        while not is_stopped(self.pid) and time.monotonic() < end:
            time.sleep(0.001)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)
        self.frozen = False

    def kill(self) -> None:
        """End it as a crash would, and return when it is gone."""
        self.signal(signal.SIGKILL)
        self._popen.wait()

    def end(self, number: int) -> None:
        """Signal it, unless it has ended, and wait for its end; after five seconds with force."""
        with contextlib.suppress(ServerNotRunning):
            if self.frozen:
                self.resume()
            self.signal(number)
        try:
            self._popen.wait(5)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def spawn(
    argv: Sequence[str],
    folder: Path,
    log: Path,
    *,
    environment: Mapping[str, str] = os.environ,
    account: Account | None = None,
) -> subprocess.Popen[bytes]:
    """Start a server in its own session, so that Ctrl-C reaches the tests and not the server.

    On Linux the kernel kills it when this process dies, however that happens. The kernel goes by
    the thread that started it, so that is asked for in the main thread only.
    """
    bound = sys.platform == "linux" and threading.current_thread() is threading.main_thread()
    with log.open("ab") as output:
        popen: subprocess.Popen[bytes] = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            # A locale that is not installed is a fatal error for newer servers.
            env={**environment, "LC_ALL": "C"},
            start_new_session=True,
            # One system call in the child; the alternative is a helper process for each server.
            # It runs after the change of the user, which would make the kernel forget it.
            preexec_fn=_die_with_parent() if bound else None,  # noqa: PLW1509
            **as_account(account),
        )
    return popen


def _die_with_parent() -> Callable[[], None]:
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    return ask


def answers(port: int, pid: int, password: str | None, timeout: float) -> bool | None:
    """Ask whoever listens on `port`: True if it is process `pid` and it serves, False if not.

    None means that it is up but does not let us look (a password that we don't know).
    """
    commands: list[tuple[str, ...]] = [("AUTH", password)] if password else []
    commands += [("PING",), ("INFO", "server")]
    try:
        with (
            socket.create_connection((HOST, port), timeout) as connection,
            connection.makefile("rb") as replies,
        ):
            connection.sendall(b"".join(map(_packed, commands)))
            if password:
                replies.readline()
            ping = replies.readline()
            if ping.startswith((b"-NOAUTH", b"-NOPERM")):
                return None
            if not ping.startswith(b"+PONG"):  # -LOADING, mostly
                return False
            info = replies.readline()
            if not info.startswith(b"$"):
                return None
            return f"process_id:{pid}\r\n".encode() in replies.read(int(info[1:]))
    except (OSError, ValueError):
        return False


def _packed(words: tuple[str, ...]) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word.encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(raw), raw))
    return b"".join(parts)


def without_secrets(text: str, password: str | None) -> str:
    """Text from a server's log, fit for an error message."""
    if password:
        for secret in {password, quoted(password)[1:-1]}:
            text = text.replace(secret, "***")
    return _SECRET_LINE.sub(r"\1 ***", text)


def new_folder(for_socket: bool) -> Path:
    """A folder that only we can read; short enough for a unix socket (107 bytes) if need be."""
    folder = Path(tempfile.mkdtemp(prefix="fencekit-"))
    if for_socket and len(os.fsencode(folder)) > 100:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="fencekit-", dir="/tmp"))
    return folder


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has taken effect; where the system has no /proc, that is assumed."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in ("T", "t")
