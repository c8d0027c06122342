"""Where a test takes place: a private server, cluster or Sentinel group, and its state.

The environment chooses, so that one suite runs everywhere:

* FENCEKIT_TEST_TOPOLOGY: standalone (default), cluster, sentinel, or tls (standalone behind TLS)
* FENCEKIT_TEST_DECODE: 1 for clients with decode_responses
* FENCEKIT_TEST_PROTOCOL: 2 or 3 for RESP
"""

from __future__ import annotations

import os
import time
from typing import Any

from fencekit.keys import KeySpace

TOPOLOGY = os.environ.get("FENCEKIT_TEST_TOPOLOGY", "standalone")
OPTIONS: dict[str, Any] = {
    "decode_responses": os.environ.get("FENCEKIT_TEST_DECODE", "0") == "1",
    "protocol": int(os.environ.get("FENCEKIT_TEST_PROTOCOL", "3")),
}


def reached(servers: Any) -> Any:
    """What makes the clients of these servers, as the environment wants it."""
    if TOPOLOGY != "tls" or not hasattr(servers, "port"):
        return servers
    from tests.tls import Secured

    return Secured(getattr(servers, "tcp_url", servers.url), servers.port)


class Site:
    """One emptied server (or group of them) for one test."""

    def __init__(self, servers: Any) -> None:
        self.servers = servers
        self.clustered = TOPOLOGY == "cluster"
        self.keys = KeySpace()
        options = {"decode_responses": False, "protocol": 2}
        if TOPOLOGY == "sentinel":
            self.admin = servers.master_client(**options)
        else:
            self.admin = servers.client(**options)
        self.flush()

    @classmethod
    def at(cls, server: Any) -> Site:
        """A site on a standalone server of a test's own, whatever the environment says."""
        site = cls.__new__(cls)
        site.servers, site.clustered, site.keys = server, False, KeySpace()
        site.admin = server.client(decode_responses=False, protocol=2)
        return site

    def threads_client(self, **options: Any) -> Any:
        """A blocking client as the environment wants it."""
        options = {**OPTIONS, **options}
        if hasattr(self.servers, "master_client"):
            return self.servers.master_client(**options)
        return reached(self.servers).client(**options)

    def aio_client(self, **options: Any) -> Any:
        """An asynchronous client as the environment wants it."""
        options = {**OPTIONS, **options}
        if hasattr(self.servers, "async_master_client"):
            return self.servers.async_master_client(**options)
        return reached(self.servers).async_client(**options)

    def flush(self) -> None:
        """Empty it."""
        if self.clustered:
            self.servers.flush()
        else:
            self.admin.flushall()

    def close(self) -> None:
        self.admin.close()

    # Moving records instead of sleeping

    def lock(self, resource: str) -> dict[str, str]:
        """The lock's record as it is on the server."""
        found = self.admin.hgetall(self.keys.lock(resource))
        return {name.decode(): value.decode() for name, value in found.items()}

    def fence(self, resource: str) -> int:
        """The fence on the server, 0 if there is none."""
        return int(self.admin.get(self.keys.fence(resource)) or 0)

    def job(self, key: str) -> dict[str, bytes]:
        """The job's record as it is on the server."""
        return {n.decode(): v for n, v in self.admin.hgetall(self.keys.job(key)).items()}

    def expire(self, key: bytes) -> None:
        """The key's time is up."""
        self.admin.pexpire(key, 1)
        while self.admin.exists(key):
            time.sleep(0.001)

    def expire_lock(self, resource: str) -> None:
        """The lease ran out on the server: its holder was frozen or cut off."""
        self.expire(self.keys.lock(resource))

    def lapse(self, key: str) -> None:
        """The claim's lease ran out on the server."""
        assert self.admin.hset(self.keys.job(key), "l", "1") == 0

    def move_fence(self, resource: str, ahead: float) -> None:
        """As if the server's clock had been so many seconds ahead at the last grant."""
        seconds, micros = self.admin.time()
        value = seconds * 1_000_000 + micros + int(ahead * 1_000_000)
        self.admin.set(self.keys.fence(resource), value, px=600_000)

    def milliseconds(self) -> int:
        """The server's clock (on a Cluster, that of one of its servers)."""
        answer = self.admin.time()
        seconds, micros = next(iter(answer.values())) if isinstance(answer, dict) else answer
        return int(seconds) * 1000 + int(micros) // 1000

    def all_keys(self) -> list[bytes]:
        """Every key there is."""
        return sorted(self.admin.scan_iter(count=1000))

    def calls(self, command: str = "evalsha") -> int:
        """How often clients have asked for this command."""
        return self._told_of(command, "calls")

    def failed_calls(self, command: str = "evalsha") -> int:
        """How many of those the server answered with an error."""
        return self._told_of(command, "failed_calls")

    def _told_of(self, command: str, count: str) -> int:
        options = {"target_nodes": "all"} if self.clustered else {}
        told = self.admin.info("commandstats", **options)
        tables = told.values() if self.clustered else [told]
        return sum(table.get(f"cmdstat_{command}", {}).get(count, 0) for table in tables)


def standing(lock: Any, resource: str) -> int:
    """How many stand in line for the resource in this process (and event loop)."""
    backends = lock._locking.backends
    queue = backends.get().room._queues.get(backends.keys.free_channel(resource))
    return 0 if queue is None else len(queue.places)
