"""One private Redis or Valkey server, started for a test and gone after it.

Rules of this module:

1. A signal goes to a process id that this object started and has not yet seen end.
2. What this object made, it removes: the process, its folder, its exit hook.
3. `restart` keeps the port and the data; `stop` ends both.
4. A password is in the configuration file, in `url` and in the clients; nowhere else.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from ._binary import ServerBinary, ServerError, dotted, find_server
from ._clients import Clients
from ._config import PERSISTENCE, Persistence, Settings
from ._process import (
    HOST,
    OwnProcess,
    ServerNotRunning,
    answers,
    free_port,
    new_folder,
    spawn,
    without_secrets,
    write_private,
)


class RedisServer(Clients):
    """A real server of your own: `start` it, hurt it, and nothing of it is left after `stop`.

    `persistence` is None (memory only), ``"aof"`` (a crash may lose the last two seconds when the
    disk is busy), ``"aof-always"`` (on disk before each reply) or ``"rdb"`` (a snapshot at a clean
    shutdown). `directory` keeps the data in a folder of yours, which is not removed. `config` takes
    further lines of ``redis.conf``.
    With `unix_socket`, `url` is the socket's; the TCP port stays open.

    Raises `ServerNotFound` if there is no binary, `ServerError` if the server does not come up.

    >>> from fencekit.testing import RedisServer
    >>> with RedisServer(persistence="aof-always") as server, server.client() as redis:
    ...     _ = redis.set("k", "v")
    ...     server.kill()
    ...     _ = server.restart()
    ...     redis.get("k")
    b'v'
    """

    external = False
    _mode: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        binary: ServerBinary | None = None,
        port: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        persistence: Persistence | None = None,
        maxmemory: int | str | None = None,
        maxmemory_policy: str | None = None,
        password: str | None = None,
        unix_socket: bool = False,
        replica_of: RedisServer | None = None,
        config: Sequence[str] = (),
    ) -> None:
        if persistence not in PERSISTENCE:
            raise ValueError("persistence is None, 'aof', 'aof-always' or 'rdb'")
        self.host = HOST
        self.binary = binary or find_server()
        self._settings = Settings(
            persistence=persistence,
            maxmemory=maxmemory,
            maxmemory_policy=maxmemory_policy,
            password=password,
            unix_socket=unix_socket,
            primary_port=None if replica_of is None else replica_of.port,
            extra=tuple(config.splitlines() if isinstance(config, str) else config),
        )
        self._wanted_port = port
        self._port = port
        self._directory = None if directory is None else Path(directory).absolute()
        self._process: OwnProcess | None = None
        self._owner: int | None = None
        self._private: Path | None = None
        self._last_log = ""

    # -- life ------------------------------------------------------------------------------------

    def start(self, timeout: float = 10.0) -> RedisServer:
        """Start the server and return when it serves; a running one is left as it is."""
        self._require_owner()
        if self.alive:
            return self
        self._owner = os.getpid()
        fresh = self.fresh
        if fresh:
            self._private = new_folder(self._settings.unix_socket)
            self._port = self._wanted_port
        atexit.unregister(self.stop)  # one hook, however often it is restarted
        atexit.register(self.stop)
        try:
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
        self._end(signal.SIGTERM)
        if self._private is not None:
            self._last_log = self.log()
            shutil.rmtree(self._private, ignore_errors=True)
            self._private = None

    def kill(self) -> None:
        """End the server as a crash would (SIGKILL); `restart` brings it back."""
        process = self._running()
        process.signal(signal.SIGKILL)
        process.end(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop the server in its tracks (SIGSTOP): connections stay open, nothing answers."""
        self._running().freeze()

    def resume(self) -> None:
        """Let a frozen server go on (SIGCONT)."""
        self._running().resume()

    def restart(self, timeout: float = 10.0) -> RedisServer:
        """Start again on the same port with the same data, after `kill` or from running.

        A running server is shut down cleanly first. Without persistence the data is gone.
        """
        self._require_owner()
        if self._private is None:
            raise ServerNotRunning("This server was never started, or it was stopped: use start().")
        self._end(signal.SIGTERM)
        return self.start(timeout)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # -- facts -----------------------------------------------------------------------------------

    @property
    def name(self) -> Literal["redis", "valkey"]:
        """Which server it is."""
        return self.binary.name

    @property
    def version(self) -> tuple[int, ...]:
        """The server's own version, which for Valkey is not the one INFO calls redis_version."""
        return self.binary.version

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

    @property
    def unix_socket(self) -> str | None:
        """The path of the unix socket, if there is one."""
        if not self._settings.unix_socket or self._private is None:
            return None
        return str(self._private / "s")

    @property
    def url(self) -> str:
        """The URL for clients; it carries the password."""
        path = self.unix_socket
        if path is None:
            return self.tcp_url
        return f"unix://{self._userinfo()}{quote(path)}?db=0"

    @property
    def tcp_url(self) -> str:
        """The URL over TCP, also when `url` is a unix socket's."""
        return f"redis://{self._userinfo()}{self.host}:{self.port}/0"

    def log(self) -> str:
        """The end of the server's output without its secrets; after `stop`, as it was then."""
        if self._private is None:
            return self._last_log
        try:
            text = (self._private / "log").read_text(errors="replace")
        except OSError:
            text = ""
        return without_secrets(text, self._settings.password)[-8000:]

    def __repr__(self) -> str:
        state = "frozen" if self.frozen else "up" if self.alive else "down"
        where = f"{self.host}:{self._port}"
        return f"<{type(self).__name__} {self.name} {dotted(self.version)} {where} {state}>"

    # -- inside ----------------------------------------------------------------------------------

    def _launch(self, fresh: bool, end: float) -> None:
        private = self._private
        assert private is not None
        taken = ""
        while True:
            if fresh:  # a restart keeps the file: Sentinel and CONFIG REWRITE write into it
                self._port = self._wanted_port or free_port()
                write_private(private / "conf", self._lines(private))
            start = (private / "log").stat().st_size if (private / "log").exists() else 0
            argv = [self.binary.path, str(private / "conf"), *self._mode]
            self._process = spawn(argv, private, private / "log")
            try:
                if self._wait_ready(start, end):
                    return
            except ServerError:
                if taken:  # the time was up in the middle of another try: this is why it was spent
                    raise ServerError(f"{self.binary} did not start. It said:\n{taken}") from None
                raise
            said = self._said(start)
            if "in use" not in said or time.monotonic() >= end:
                raise ServerError(f"{self.binary} did not start. It said:\n{said}")
            taken = said
            time.sleep(0.05)  # the port: another one, or the same after its holder has let go

    def _wait_ready(self, start: int, end: float) -> bool:
        process = self._running()
        while process.alive:
            left = end - time.monotonic()
            if left <= 0:
                raise ServerError(f"{self.binary} was not ready in time. It said:\n{self.log()}")
            ready = answers(self.port, process.pid, self._settings.password, min(0.5, left))
            if ready or (ready is None and "eady to accept" in self._said(start)):
                return True
            time.sleep(0.003)
        return False

    def _said(self, start: int) -> str:
        assert self._private is not None
        with (self._private / "log").open("rb") as file:
            file.seek(start)
            return without_secrets(file.read().decode(errors="replace"), self._settings.password)[
                -4000:
            ]

    def _lines(self, private: Path) -> list[str]:
        data = self._directory or private
        data.mkdir(parents=True, exist_ok=True)
        return self._settings.lines(self.version, self.port, data, private)

    def _userinfo(self) -> str:
        return (
            ""
            if self._settings.password is None
            else f":{quote(self._settings.password, safe='')}@"
        )

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
