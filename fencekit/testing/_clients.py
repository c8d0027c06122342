"""Clients for whatever has a URL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redis import Redis
    from redis.asyncio import Redis as AsyncRedis


class Clients(ABC):
    """Makes new clients; redis-py is imported when the first one is wanted."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL that clients connect to."""

    def client(self, **options: Any) -> Redis:
        """A new `redis.Redis` for `url`; the caller closes it."""
        from redis import Redis

        client: Redis = Redis.from_url(self.url, **options)
        return client

    def async_client(self, **options: Any) -> AsyncRedis:
        """A new `redis.asyncio.Redis` for `url`; the caller closes it."""
        from redis.asyncio import Redis as AsyncRedis

        client: AsyncRedis = AsyncRedis.from_url(self.url, **options)
        return client
