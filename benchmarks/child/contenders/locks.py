"""Locks of other projects, each imported when it is wanted."""

from __future__ import annotations

import importlib
from typing import Any

import redis


def _load(name: str) -> Any:
    """A library that may be in another environment than this module is checked in."""
    return importlib.import_module(name)


class _Base:
    ASYNC = False

    def __init__(self, url: str) -> None:
        self.client: Any = redis.Redis.from_url(url)

    def close(self) -> None:
        self.client.close()

    def release(self, held: Any) -> None:
        held.release()


class PythonRedisLock(_Base):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.module = _load("redis_lock")

    def acquire(self, name: str, wait: float = 0) -> Any:
        lock = self.module.Lock(self.client, name, expire=30)
        if not lock.acquire(blocking=wait > 0, timeout=int(wait) or None):
            raise TimeoutError(name)
        return lock


class Pottery(_Base):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.module = _load("pottery")
        self.masters = {self.client}

    def acquire(self, name: str, wait: float = 0) -> Any:
        lock = self.module.Redlock(key=name, masters=self.masters, auto_release_time=30)
        if not lock.acquire(blocking=wait > 0, timeout=wait or -1):
            raise TimeoutError(name)
        return lock


class Portalocker(_Base):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.module = _load("portalocker")

    def acquire(self, name: str, wait: float = 0) -> Any:
        lock = self.module.RedisLock(
            name, connection=self.client, timeout=wait or 10, interrupt_on_lost=False
        )
        lock.acquire(fail_when_locked=not wait)
        return lock


class Mithril(_Base):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.module = _load("mithril")
        self.backend = _load("mithril.backends").RedisBackend(self.client)

    def acquire(self, name: str, wait: float = 0) -> Any:
        lock = self.module.Lock(name, backend=self.backend, ttl=30.0)
        lock.acquire(blocking=wait > 0, timeout=wait or None)
        return lock


class RedlockNg(_Base):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.manager = _load("redlock").Redlock([url])

    def acquire(self, name: str, wait: float = 0) -> Any:
        lock = self.manager.acquire(name, 30_000, blocking=wait > 0)
        if not lock:
            raise TimeoutError(name)
        return lock

    def release(self, held: Any) -> None:
        self.manager.release(held)
