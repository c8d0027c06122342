"""What the figures depend on: the machine, in neutral words, and the versions."""

from __future__ import annotations

import os
import platform
from typing import Any

import redis

import fencekit
from benchmarks.environments import ENVIRONMENTS
from fencekit.testing import RedisServer

PEERS = {
    "peers": (
        *("python-redis-lock", "portalocker", "aws-lambda-powertools", "idemkit"),
        *("celery", "celery-once", "celery-singleton"),
    ),
    "pottery": ("pottery",),
    "mithril": ("mithril-locks", "redis"),
    "redlock": ("redlock-ng", "redis"),
    "published": ("fencekit",),
}


def facts(server: RedisServer, peers: bool) -> dict[str, Any]:
    """For results.json and the tables."""
    found: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "redis-py": redis.__version__,
        "server": f"{server.name} {'.'.join(map(str, server.version))}",
        "fencekit": fencekit.__version__,
    }
    if peers:
        found["peers"] = {
            name: installed
            for name, wanted in PEERS.items()
            if ENVIRONMENTS[name].python.exists()
            and (installed := ENVIRONMENTS[name].versions(wanted))
        }
    return found
