"""One private Redis or Valkey server, started for a test and gone after it.

Rule of this module, beside those of `_server`: a password is in the configuration file, in `url`
and in the clients; nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from ._binary import ServerBinary, find_server
from ._clients import Clients
from ._config import PERSISTENCE, Persistence, Settings
from ._process import OwnProcess, answers, new_folder, spawn, without_secrets, write_private
from ._server import PrivateServer


class RedisServer(PrivateServer, Clients):
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
        self.binary = binary or find_server()
        super().__init__(str(self.binary), port)
        self._settings = Settings(
            persistence=persistence,
            maxmemory=maxmemory,
            maxmemory_policy=maxmemory_policy,
            password=password,
            unix_socket=unix_socket,
            primary_port=None if replica_of is None else replica_of.port,
            extra=tuple(config.splitlines() if isinstance(config, str) else config),
        )
        self._directory = None if directory is None else Path(directory).absolute()

    @property
    def name(self) -> Literal["redis", "valkey"]:
        """Which server it is."""
        return self.binary.name

    @property
    def version(self) -> tuple[int, ...]:
        """The server's own version, which for Valkey is not the one INFO calls redis_version."""
        return self.binary.version

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

    # -- inside ----------------------------------------------------------------------------------

    def _new_folder(self) -> Path:
        return new_folder(self._settings.unix_socket)

    def _spawn(self, private: Path, fresh: bool) -> OwnProcess:
        if fresh:  # a restart keeps the file: Sentinel and CONFIG REWRITE write into it
            write_private(private / "conf", self._lines(private))
        argv = [self.binary.path, str(private / "conf"), *self._mode]
        return OwnProcess(spawn(argv, private, private / "log"))

    def _ready(self, pid: int, timeout: float, begun: int) -> bool:
        ready = answers(self.port, pid, self._settings.password, timeout)
        return bool(ready) or (ready is None and "eady to accept" in self._said(begun))

    def _shown(self, text: str) -> str:
        return without_secrets(text, self._settings.password)

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
