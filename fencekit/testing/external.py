"""A server that somebody else runs, and the choice between it and a private one.

Rule of this module: an external server is only ever connected to. What would end, stop or
change it raises `ExternalServer`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit, urlunsplit

from ._binary import URL_VARIABLE, ServerError
from ._clients import Clients
from ._postgres_binary import PG_URL_VARIABLE
from .postgres import PostgresServer
from .servers import RedisServer


class ExternalServer(ServerError):
    """This needs a private server; the one at hand is somebody else's."""


class _NotOurs:
    """A private server's names, which refuse: somebody else runs this server."""

    external = True
    _variable: str
    _private: str

    def __init__(self, url: str) -> None:
        self._url = url
        self._parts = urlsplit(url)

    @property
    def url(self) -> str:
        """The URL as it was given."""
        return self._url

    @property
    def frozen(self) -> bool:
        """Always False: nobody froze it through this object."""
        return False

    @property
    def pid(self) -> int:
        """Raises `ExternalServer`."""
        self._refuse("has a process id of its own")

    def start(self, timeout: float = 10.0) -> NoReturn:
        """Raises `ExternalServer`."""
        self._refuse("cannot be started")

    def stop(self) -> NoReturn:
        """Raises `ExternalServer`."""
        self._refuse("cannot be stopped")

    def kill(self) -> NoReturn:
        """Raises `ExternalServer`."""
        self._refuse("cannot be killed")

    def freeze(self) -> NoReturn:
        """Raises `ExternalServer`."""
        self._refuse("cannot be frozen")

    def resume(self) -> NoReturn:
        """Raises `ExternalServer`."""
        self._refuse("cannot be resumed")

    def restart(self, timeout: float = 10.0) -> NoReturn:
        """Raises `ExternalServer`."""
        self._refuse("cannot be restarted")

    def log(self) -> NoReturn:
        """Raises `ExternalServer`."""
        self._refuse("keeps its log to itself")

    def _refuse(self, what: str) -> NoReturn:
        raise ExternalServer(
            f"The server that {self._variable} names is not ours and {what} from here. Unset the "
            f"variable, or use {self._private}(), to have a private one."
        )

    def __repr__(self) -> str:
        parts = self._parts
        place = parts.netloc.rpartition("@")[2]
        shown = f"***@{place}" if "@" in parts.netloc else place
        # The query is left out: it may carry a password too.
        return f"<{type(self).__name__} {urlunsplit((parts.scheme, shown, parts.path, '', ''))}>"


class ExternalRedis(_NotOurs, Clients):
    """A server that already runs; it has `RedisServer`'s names, and refuses what would hurt it.

    >>> from fencekit.testing import ExternalRedis
    >>> ExternalRedis("redis://:secret@127.0.0.1:6379/0")
    <ExternalRedis redis://***@127.0.0.1:6379/0>
    """

    _variable = URL_VARIABLE
    _private = "RedisServer"

    @property
    def host(self) -> str:
        """The host in the URL; empty for a unix socket."""
        return self._parts.hostname or ("" if self._parts.scheme == "unix" else "localhost")

    @property
    def port(self) -> int:
        """The port in the URL, 6379 if it has none; raises for a unix socket."""
        if self._parts.scheme == "unix":
            raise ExternalServer("The external server is reached by a unix socket: no port.")
        return self._parts.port or 6379

    @property
    def name(self) -> Literal["redis", "valkey"]:
        """Which server it is, as it says itself."""
        return "valkey" if "valkey_version" in self._info else "redis"

    @property
    def version(self) -> tuple[int, ...]:
        """The server's own version, as it says itself."""
        told = self._info.get("valkey_version") or self._info["redis_version"]
        return tuple(int(part) for part in str(told).split(".") if part.isdigit())

    @property
    def alive(self) -> bool:
        """Whether it answers a PING."""
        from redis.exceptions import RedisError

        try:
            with self.client() as client:
                return bool(client.ping())
        except RedisError:
            return False

    @cached_property
    def _info(self) -> dict[str, Any]:
        with self.client() as client:
            info: Any = client.info("server")
        return dict(info)


class ExternalPostgres(_NotOurs):
    """A PostgreSQL server that already runs: its `url`, and a refusal of what would hurt it.

    >>> from fencekit.testing import ExternalPostgres
    >>> ExternalPostgres("postgresql://me:secret@127.0.0.1/app")
    <ExternalPostgres postgresql://***@127.0.0.1/app>
    """

    _variable = PG_URL_VARIABLE
    _private = "PostgresServer"

    @property
    def host(self) -> str:
        """The host in the URL; empty if it has none, as for a unix socket."""
        return self._parts.hostname or ""

    @property
    def port(self) -> int:
        """The port in the URL, 5432 if it has none."""
        return self._parts.port or 5432


@contextlib.contextmanager
def open_server(**options: Any) -> Iterator[RedisServer | ExternalRedis]:
    """The server that ``FENCEKIT_REDIS_URL`` names, else a private one made with `options`.

    Look at `external` before you flush or hurt it: somebody else's server refuses the latter.

    >>> from fencekit.testing import open_server
    >>> with open_server() as server, server.client() as redis:
    ...     redis.ping()
    True
    """
    url = os.environ.get(URL_VARIABLE)
    if url:
        yield ExternalRedis(url)
        return
    with RedisServer(**options) as server:
        yield server


@contextlib.contextmanager
def open_postgres(**options: Any) -> Iterator[PostgresServer | ExternalPostgres]:
    """The server that ``FENCEKIT_PG_URL`` names, else a private one made with `options`.

    Nothing in an external one is changed or removed: give your tables names of their own there.

    >>> from fencekit.testing import open_postgres
    >>> with open_postgres() as server:
    ...     server.url.startswith("postgresql")
    True
    """
    url = os.environ.get(PG_URL_VARIABLE)
    if url:
        yield ExternalPostgres(url)
        return
    with PostgresServer(**options) as server:
        yield server
