"""A Celery task that is sent once: the cost of sending it, with a broker in memory."""

from __future__ import annotations

import importlib
from typing import Any

import redis


def _app() -> Any:
    celery: Any = importlib.import_module("celery")
    return celery.Celery("benchmark", broker="memory://", set_as_current=False)


class Plain:
    """``apply_async`` alone."""

    ASYNC = False
    BASE = ""

    def __init__(self, url: str) -> None:
        self.url = url
        self.app = _app()
        self.configure()
        options: dict[str, Any] = {"name": "benchmark.work", "shared": False}
        if self.BASE:
            module, name = self.BASE.split(":")
            options["base"] = getattr(importlib.import_module(module), name)

        def work(order: str) -> None:
            """Never runs: nobody takes it from the broker."""

        self.task = self.app.task(**options)(work)

    def configure(self) -> None:
        """Settings of the application."""

    def close(self) -> None:
        self.app.close()

    def enqueue(self, name: str) -> None:
        self.task.apply_async((name,))


class Once(Plain):
    """celery-once."""

    BASE = "celery_once:QueueOnce"

    def configure(self) -> None:
        self.app.conf.ONCE = {
            "backend": "celery_once.backends.Redis",
            "settings": {"url": self.url, "default_timeout": 3600},
        }


class Singleton(Plain):
    """celery-singleton."""

    BASE = "celery_singleton:Singleton"

    def configure(self) -> None:
        self.app.conf.singleton_backend_url = self.url


class Guarded(Plain):
    """fencekit's guard in front of ``apply_async``."""

    def configure(self) -> None:
        fencekit: Any = importlib.import_module("fencekit")
        self.guard = fencekit.IdempotencyGuard(redis.Redis.from_url(self.url))

    def enqueue(self, name: str) -> None:
        if self.guard.try_begin(name, ttl=3600):
            self.task.apply_async((name,))
