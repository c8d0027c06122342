"""Private real servers for tests, demos and your own suites, and a proxy that hurts connections.

Importing this starts nothing, and needs neither pytest nor an event loop. The fixtures are in
`fencekit.testing.plugin`, which pytest finds by itself.
"""

from __future__ import annotations

from ._binary import ServerBinary, ServerError, ServerNotFound, find_server
from ._process import ServerNotRunning
from .cluster import ClusterServers
from .external import ExternalRedis, ExternalServer, open_server
from .proxy import Proxy
from .sentinel import SentinelServers
from .servers import RedisServer

__all__ = [
    "ClusterServers",
    "ExternalRedis",
    "ExternalServer",
    "Proxy",
    "RedisServer",
    "SentinelServers",
    "ServerBinary",
    "ServerError",
    "ServerNotFound",
    "ServerNotRunning",
    "find_server",
    "open_server",
]
