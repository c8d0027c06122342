"""A private master with replicas, and the Sentinels that watch it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ._binary import ServerBinary, ServerError, find_server
from ._config import Persistence, listening
from ._group import start_all, stop_all, wait_until
from ._process import HOST, quoted
from .servers import RedisServer

if TYPE_CHECKING:
    from redis import Redis
    from redis.asyncio import Redis as AsyncRedis


class SentinelServers:
    """A real master, its replicas and its Sentinels, all your own; `failover` swaps the master.

    The password is the data servers'; the Sentinels have none. `down_after` is the time in seconds
    after which a silent master counts as down.

    Raises `ServerNotFound` if there is no binary, `ServerError` if they do not find each other.

    >>> from fencekit.testing import SentinelServers
    >>> with SentinelServers() as sentinel, sentinel.master_client() as redis:
    ...     redis.set("k", "v")
    True
    """

    def __init__(
        self,
        replicas: int = 1,
        sentinels: int = 3,
        *,
        service_name: str = "fencekit",
        binary: ServerBinary | None = None,
        persistence: Persistence | None = None,
        password: str | None = None,
        down_after: float = 0.8,
        config: Sequence[str] = (),
    ) -> None:
        if replicas < 1 or sentinels < 1:
            raise ValueError("a failover takes one replica and one Sentinel at least")
        self.service_name = service_name
        self._binary = binary or find_server()
        self._replicas = replicas
        self._count = sentinels
        self._down_after = down_after
        self._password = password
        self._options: dict[str, Any] = {
            "binary": self._binary,
            "persistence": persistence,
            "password": password,
            "config": config,
        }
        self.servers: list[RedisServer] = []
        self.sentinels: list[RedisServer] = []

    def start(self, timeout: float = 30.0) -> SentinelServers:
        """Start them all and return when replicas are in step and every Sentinel knows them."""
        if self.servers:
            return self
        try:
            self._start(timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End all of them and remove what they left; calling it again does nothing."""
        servers = [*self.servers, *self.sentinels]
        self.servers, self.sentinels = [], []
        stop_all(servers)

    def __enter__(self) -> SentinelServers:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def sentinel_addresses(self) -> list[tuple[str, int]]:
        """What `redis.sentinel.Sentinel` wants as its first argument."""
        return [(server.host, server.port) for server in self.sentinels]

    @property
    def master(self) -> RedisServer:
        """The server that the Sentinels call the master now, alive or not."""
        for sentinel in self.sentinels:
            if sentinel.alive and not sentinel.frozen:
                port = self._address(sentinel)
                return next(server for server in self.servers if server.port == port)
        raise ServerError("No Sentinel is running.")

    @property
    def replicas(self) -> list[RedisServer]:
        """The other servers, alive or not."""
        master = self.master
        return [server for server in self.servers if server is not master]

    def master_client(self, **options: Any) -> Redis:
        """A new client that asks the Sentinels for the master at each connect; close it."""
        from redis import Redis, sentinel

        class MasterClient(Redis):
            """Closes the connections to the Sentinels too, which redis-py leaves open."""

            def close(self) -> None:
                super().close()
                for client in manager.sentinels:
                    client.close()

        make: Any = sentinel.Sentinel
        manager = make(self.sentinel_addresses, **self._credentials(options))
        return cast("Redis", manager.master_for(self.service_name, redis_class=MasterClient))

    def async_master_client(self, **options: Any) -> AsyncRedis:
        """A new asyncio client that asks the Sentinels for the master at each connect; close it."""
        from redis.asyncio import Redis as AsyncRedis
        from redis.asyncio import sentinel

        class MasterClient(AsyncRedis):
            """Closes the connections to the Sentinels too, which redis-py leaves open."""

            async def aclose(self, close_connection_pool: bool | None = True) -> None:
                for client in (super(), *manager.sentinels):
                    # Before redis-py 5.0.1 it has another name.
                    close = getattr(client, "aclose", None) or client.close
                    await close(close_connection_pool)

        make: Any = sentinel.Sentinel
        manager = make(self.sentinel_addresses, **self._credentials(options))
        return cast("AsyncRedis", manager.master_for(self.service_name, redis_class=MasterClient))

    def failover(self, timeout: float = 30.0) -> RedisServer:
        """Kill the master, wait until all Sentinels agree on another, and return that one.

        The killed server stays down until `heal`.
        """
        before = self.master
        before.kill()
        wait_until(lambda: self._moved(before), timeout, "The failover", self.sentinels)
        return self.master

    def heal(self, timeout: float = 30.0) -> None:
        """Bring back what was killed or frozen, and return when all are in step again."""
        for server in (*self.servers, *self.sentinels):
            if server.frozen:
                server.resume()
            elif not server.alive:
                server.restart()
        end = time.monotonic() + timeout
        self._quicken()
        self._wait(self._in_step, end, "Replication", self.servers)
        self._wait(self._all_known, end, "Discovery", self.sentinels)

    # -- inside ----------------------------------------------------------------------------------

    def _start(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        master = RedisServer(**self._options).start()
        self.servers.append(master)
        for _ in range(self._replicas):
            self.servers.append(RedisServer(**self._options, replica_of=master))
        start_all(self.servers)
        # In step before the Sentinels look: they ask a master for its replicas each ten seconds.
        self._wait(self._in_step, end, "Replication", self.servers)
        for _ in range(self._count):
            watch = self._watch(master)
            self.sentinels.append(_SentinelServer(self._binary, watch, self._password))
        start_all(self.sentinels)
        self._quicken()
        self._wait(self._all_known, end, "Discovery", self.sentinels)

    def _quicken(self) -> None:
        """Let Sentinels greet and look more often: in step in a second, not in ten."""
        if self._binary.version < (7, 0):
            return
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                command: Any = client.execute_command
                command("SENTINEL", "DEBUG", "INFO-PERIOD", 200, "PUBLISH-PERIOD", 200)

    def _wait(self, true: Any, end: float, what: str, servers: Sequence[RedisServer]) -> None:
        wait_until(true, max(0.1, end - time.monotonic()), what, servers)

    def _watch(self, master: RedisServer) -> list[str]:
        name = self.service_name
        lines = [
            f"sentinel monitor {name} {HOST} {master.port} {self._count // 2 + 1}",
            f"sentinel down-after-milliseconds {name} {round(self._down_after * 1000)}",
            f"sentinel failover-timeout {name} 2000",
            f"sentinel parallel-syncs {name} 1",
        ]
        if self._password is not None:
            lines.append(f"sentinel auth-pass {name} {quoted(self._password)}")
        return lines

    def _in_step(self) -> bool:
        roles: list[str] = []
        for server in self.servers:
            with server.client() as client:
                told: Any = client.info("replication")
            roles.append(told["role"])
            if told.get("master_link_status", "up") != "up":
                return False
        return roles.count("master") == 1

    def _all_known(self) -> bool:
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                told: Any = client.sentinel_master(self.service_name)
            others = (told["num-slaves"], told["num-other-sentinels"])
            if others != (self._replicas, self._count - 1):
                return False
        return True

    def _moved(self, before: RedisServer) -> bool:
        ports = {self._address(server) for server in self.sentinels if server.alive}
        if len(ports) != 1 or before.port in ports:
            return False
        with self.master.client() as client:
            told: Any = client.info("replication")
        return bool(told["role"] == "master")

    def _address(self, sentinel: RedisServer) -> int:
        with sentinel.client() as client:
            address: Any = client.sentinel_get_master_addr_by_name(self.service_name)
        return int(address[1])

    def _credentials(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"password": self._password, **options}

    def __repr__(self) -> str:
        return f"<SentinelServers {self.service_name} {[*self.servers, *self.sentinels]!r}>"


class _SentinelServer(RedisServer):
    """A Sentinel: the same binary in another mode, with a file that it rewrites itself."""

    _mode = ("--sentinel",)

    def __init__(self, binary: ServerBinary, watch: list[str], secret: str | None) -> None:
        super().__init__(binary=binary)
        self._watch = watch
        self._secret = secret

    def _lines(self, private: Path) -> list[str]:
        return [*listening(self.port, private), *self._watch]
