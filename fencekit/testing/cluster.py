"""A private cluster.

Forming takes two seconds at least: a master serves only after it has been up that long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._binary import ServerBinary, find_server
from ._config import Persistence
from ._group import start_all, stop_all, wait_until
from ._process import HOST
from .servers import RedisServer

if TYPE_CHECKING:
    from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster
    from redis.cluster import RedisCluster

SLOTS = 16384


class ClusterServers:
    """A real cluster of your own: `nodes` masters that share the slots, each a `RedisServer`.

    Raises `ServerNotFound` if there is no binary, `ServerError` if the cluster does not form.

    >>> from fencekit.testing import ClusterServers
    >>> with ClusterServers() as cluster, cluster.client() as redis:
    ...     redis.set("k", "v")
    True
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        binary: ServerBinary | None = None,
        persistence: Persistence | None = None,
        password: str | None = None,
        node_timeout: float = 2.0,
        config: Sequence[str] = (),
    ) -> None:
        if nodes < 1:
            raise ValueError("a cluster has one node at least")
        binary = binary or find_server()
        lines = config.splitlines() if isinstance(config, str) else list(config)
        self.nodes = [
            RedisServer(
                binary=binary,
                persistence=persistence,
                password=password,
                config=[
                    "cluster-enabled yes",
                    "cluster-config-file nodes.conf",
                    f"cluster-node-timeout {round(node_timeout * 1000)}",
                    *lines,
                ],
            )
            for _ in range(nodes)
        ]

    def start(self, timeout: float = 30.0) -> ClusterServers:
        """Start the nodes, share the slots, and return when every node says that it is well.

        Nodes that were killed come back with their slots.
        """
        fresh = all(node.fresh for node in self.nodes)
        start_all(self.nodes)
        try:
            if fresh:
                self._introduce()
            self.wait_ok(timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End all nodes and remove what they left; calling it again does nothing."""
        stop_all(self.nodes)

    def __enter__(self) -> ClusterServers:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The first node's URL; a cluster client finds the others."""
        return self.nodes[0].url

    def client(self, **options: Any) -> RedisCluster:
        """A new `redis.cluster.RedisCluster`; the caller closes it."""
        from redis.cluster import RedisCluster

        class Client(RedisCluster):
            """Closes the nodes' connections, which redis-py leaves to the garbage collector."""

            def close(self) -> None:
                nodes: list[Any] = []
                with contextlib.suppress(AttributeError):  # it never got as far as knowing them
                    nodes = list(self.nodes_manager.nodes_cache.values())
                super().close()
                for node in nodes:
                    if node.redis_connection is not None:
                        node.redis_connection.connection_pool.disconnect()

        client: RedisCluster = Client.from_url(self.url, **options)
        return client

    def async_client(self, **options: Any) -> AsyncRedisCluster:
        """A new `redis.asyncio.cluster.RedisCluster`; the caller closes it."""
        from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster

        client: AsyncRedisCluster = AsyncRedisCluster.from_url(self.url, **options)
        return client

    def node_for(self, key: str | bytes) -> RedisServer:
        """The node that owned the key's slot when the cluster formed."""
        with self.nodes[0].client() as client:
            slot: Any = client.execute_command("CLUSTER KEYSLOT", key)
        return next(self.nodes[i] for i, slots in enumerate(self._ranges()) if slot in slots)

    def flush(self) -> None:
        """Remove all keys of all nodes."""
        for node in self.nodes:
            with node.client() as client:
                client.flushall()

    def wait_ok(self, timeout: float = 30.0) -> None:
        """Return when every node says that the cluster is whole; raises `ServerError` if not."""
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(node.client()) for node in self.nodes]
            wait_until(lambda: all(map(self._well, clients)), timeout, "The cluster", self.nodes)

    def _introduce(self) -> None:
        with contextlib.ExitStack() as stack:
            clients: list[Any] = [stack.enter_context(node.client()) for node in self.nodes]
            for i, slots in enumerate(self._ranges()):
                clients[i].execute_command("CLUSTER", "ADDSLOTS", *slots)
                clients[i].execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            for client in clients:
                for node in self.nodes:
                    client.execute_command("CLUSTER", "MEET", HOST, node.port)

    def _ranges(self) -> list[range]:
        count = len(self.nodes)
        return [range(SLOTS * i // count, SLOTS * (i + 1) // count) for i in range(count)]

    def _well(self, client: Any) -> bool:
        # In two words: as "CLUSTER INFO", redis-py would parse the reply, by version differently.
        reply: Any = client.execute_command("CLUSTER", "INFO")
        text = reply.decode() if isinstance(reply, bytes) else str(reply)
        wanted = {
            "cluster_state:ok",
            f"cluster_slots_ok:{SLOTS}",
            f"cluster_known_nodes:{len(self.nodes)}",
        }
        return wanted <= set(text.split())

    def __repr__(self) -> str:
        return f"<ClusterServers {self.nodes!r}>"
