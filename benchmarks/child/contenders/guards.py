"""Idempotency guards of other projects, each imported when it is wanted."""

from __future__ import annotations

import importlib
import os
from typing import Any

import redis
import redis.asyncio

MEMO = "x" * 18


class Powertools:
    """The decorator of aws-lambda-powertools, with Redis behind it."""

    ASYNC = False

    def __init__(self, url: str) -> None:
        os.environ.setdefault("AWS_LAMBDA_FUNCTION_NAME", "benchmark")
        module: Any = importlib.import_module("aws_lambda_powertools.utilities.idempotency")
        stores: Any = importlib.import_module(
            "aws_lambda_powertools.utilities.idempotency.persistence.redis"
        )
        self.client: Any = redis.Redis.from_url(url, decode_responses=True)
        store = stores.RedisCachePersistenceLayer(client=self.client)

        def work(name: str) -> str:
            return MEMO

        self.work = module.idempotent_function(
            work, data_keyword_argument="name", persistence_store=store
        )

    def close(self) -> None:
        self.client.close()

    def job(self, name: str) -> None:
        self.work(name=name)


class Idemkit:
    """The decorator of idemkit for code without ``await``."""

    ASYNC = False

    def __init__(self, url: str) -> None:
        module: Any = importlib.import_module("idemkit")
        backend = module.RedisBackend(redis.asyncio.Redis.from_url(url))

        def work(name: str) -> str:
            return MEMO

        config = module.MethodConfig(key_fields=["name"], scope=lambda _: "benchmark")
        self.work = module.idempotent_sync(backend=backend, config=config)(work)

    def close(self) -> None:
        """Its client lives in a loop of its own, until the process ends."""

    def job(self, name: str) -> None:
        self.work(name=name)


class AsyncIdemkit:
    """The same for coroutines."""

    ASYNC = True

    def __init__(self, url: str) -> None:
        module: Any = importlib.import_module("idemkit")
        self.client: Any = redis.asyncio.Redis.from_url(url)
        backend = module.RedisBackend(self.client)

        async def work(name: str) -> str:
            return MEMO

        config = module.MethodConfig(key_fields=["name"], scope=lambda _: "benchmark")
        self.work = module.idempotent(backend=backend, config=config)(work)

    async def close(self) -> None:
        await self.client.aclose()

    async def job(self, name: str) -> None:
        await self.work(name=name)
