"""What a private server is told in its configuration file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ._process import HOST, quoted

Persistence = Literal["aof", "aof-always", "rdb"]

PERSISTENCE: dict[Persistence | None, tuple[str, ...]] = {
    None: ('save ""', "appendonly no"),
    "aof": ('save ""', "appendonly yes", "appendfsync everysec"),
    "aof-always": ('save ""', "appendonly yes", "appendfsync always"),
    "rdb": ("save 3600 1", "appendonly no"),
}


@dataclass(frozen=True, repr=False)  # its repr would carry the password
class Settings:
    """The settings that outlive one start."""

    persistence: Persistence | None = None
    maxmemory: int | str | None = None
    maxmemory_policy: str | None = None
    password: str | None = None
    unix_socket: bool = False
    primary_port: int | None = None
    extra: Sequence[str] = ()

    def lines(self, version: tuple[int, ...], port: int, data: Path, private: Path) -> list[str]:
        """The whole file for a data server."""
        return [
            *listening(port, data),
            *self._socket(private),
            *self._storage(version),
            *self._access(),
            *self.extra,
        ]

    def _socket(self, private: Path) -> Iterator[str]:
        if self.unix_socket:
            yield f"unixsocket {quoted(str(private / 's'))}"
            yield "unixsocketperm 700"

    def _storage(self, version: tuple[int, ...]) -> Iterator[str]:
        yield from PERSISTENCE[self.persistence]
        yield "repl-diskless-sync yes"
        yield "repl-diskless-sync-delay 0"  # 5 s by default, which a test would wait for
        if version >= (7, 0):
            yield "shutdown-timeout 0"  # else a stop waits 10 s for a replica that is gone
        if self.maxmemory is not None:
            yield f"maxmemory {self.maxmemory}"
        if self.maxmemory_policy is not None:
            yield f"maxmemory-policy {self.maxmemory_policy}"
        if self.primary_port is not None:
            yield f"replicaof {HOST} {self.primary_port}"

    def _access(self) -> Iterator[str]:
        if self.password is not None:
            yield f"requirepass {quoted(self.password)}"
            yield f"masterauth {quoted(self.password)}"


def listening(port: int, data: Path) -> Iterator[str]:
    """The lines that every kind of server needs, a Sentinel too."""
    yield f"port {port}"
    yield f"bind {HOST}"
    yield f"dir {quoted(str(data))}"
    yield "daemonize no"
    yield 'logfile ""'
