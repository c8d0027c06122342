"""Private real servers for tests, demos and your own suites, and a proxy that hurts connections.

Importing this starts nothing, and needs neither pytest nor an event loop. The fixtures are in
`fencekit.testing.plugin`, which pytest finds by itself.
"""

from __future__ import annotations

from ._binary import ServerBinary, ServerError, ServerNotFound, find_server
from ._postgres_binary import PostgresBinaries, find_postgres
from ._process import ServerNotRunning
from .cluster import ClusterServers
from .external import ExternalPostgres, ExternalRedis, ExternalServer, open_postgres, open_server
from .postgres import PostgresServer
from .proxy import Proxy
from .sentinel import SentinelServers
from .servers import RedisServer

__all__ = [
    "ClusterServers",
    "ExternalPostgres",
    "ExternalRedis",
    "ExternalServer",
    "PostgresBinaries",
    "PostgresServer",
    "Proxy",
    "RedisServer",
    "SentinelServers",
    "ServerBinary",
    "ServerError",
    "ServerNotFound",
    "ServerNotRunning",
    "find_postgres",
    "find_server",
    "open_postgres",
    "open_server",
]
