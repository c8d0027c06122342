"""The limits: the same scripts with nothing around them."""

from __future__ import annotations

import os
import socket
from typing import Any
from urllib.parse import urlsplit

import redis
import redis.asyncio

from .words import Words, answered, digest, sources

GATE = f"gate:{os.getpid():08d}"


class Raw:
    """redis-py's ``evalsha``."""

    ASYNC = False

    def __init__(self, url: str) -> None:
        self.client: Any = redis.Redis.from_url(url)
        for source in sources():
            self.client.script_load(source)
        self.known: dict[str, Words] = {}
        self.token = b""

    def close(self) -> None:
        self.client.close()

    def prepare(self, op: str, names: list[str]) -> None:
        self.known = {name: Words(name) for name in names}
        if op == "write" and not self.token:
            self.gate = Words(GATE)
            self.token = self._call("acquire", self.gate.acquire())[1]

    def _call(self, script: str, words: tuple[bytes, ...]) -> Any:
        return self.client.evalsha(digest(script), int(words[0]), *words[1:])

    def acquire(self, name: str, wait: float = 0) -> Any:
        words = self.known[name]
        reply = self._call("acquire", words.acquire())
        answered(reply, 1)
        return words, reply[1]

    def release(self, held: Any) -> None:
        words, token = held
        answered(self._call("release", words.release(token)), 1)

    def job(self, name: str) -> None:
        words = self.known[name]
        reply = self._call("begin", words.begin())
        answered(reply, b"begun")
        answered(self._call("settle", words.settle(reply[2])), 1)

    def write(self, name: str) -> None:
        answered(self._call("gate", self.gate.write(self.token)), 1)


class Bare(Raw):
    """The same bytes over a socket."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname or "", parts.port or 0))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = self.socket.makefile("rb")

    def close(self) -> None:
        self.buffer.close()
        self.socket.close()
        super().close()

    def _call(self, script: str, words: tuple[bytes, ...]) -> Any:
        parts = [b"*%d\r\n" % (len(words) + 2), b"$7\r\nEVALSHA\r\n"]
        for word in (digest(script).encode(), *words):
            parts.append(b"$%d\r\n%b\r\n" % (len(word), word))
        self.socket.sendall(b"".join(parts))
        return self._reply()

    def _reply(self) -> Any:
        line = self.buffer.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"$":
            size = int(rest)
            return None if size < 0 else self.buffer.read(size + 2)[:-2]
        if kind == b"*":
            return [self._reply() for _ in range(int(rest))]
        raise RuntimeError(line.decode(errors="replace"))


class AsyncRaw:
    """redis-py's ``evalsha`` with ``await``."""

    ASYNC = True

    def __init__(self, url: str) -> None:
        self.client: Any = redis.asyncio.Redis.from_url(url, max_connections=1000)
        self.known: dict[str, Words] = {}
        self.loaded = False
        self.token = b""

    async def close(self) -> None:
        await self.client.aclose()

    async def prepare(self, op: str, names: list[str]) -> None:
        self.known = {name: Words(name) for name in names}
        if not self.loaded:
            self.loaded = True
            for source in sources():
                await self.client.script_load(source)
        if op == "write" and not self.token:
            self.gate = Words(GATE)
            self.token = (await self._call("acquire", self.gate.acquire()))[1]

    async def _call(self, script: str, words: tuple[bytes, ...]) -> Any:
        call: Any = self.client.evalsha
        return await call(digest(script), int(words[0]), *words[1:])

    async def acquire(self, name: str, wait: float = 0) -> Any:
        words = self.known[name]
        reply = await self._call("acquire", words.acquire())
        answered(reply, 1)
        return words, reply[1]

    async def release(self, held: Any) -> None:
        words, token = held
        answered(await self._call("release", words.release(token)), 1)

    async def job(self, name: str) -> None:
        words = self.known[name]
        reply = await self._call("begin", words.begin())
        answered(reply, b"begun")
        answered(await self._call("settle", words.settle(reply[2])), 1)

    async def write(self, name: str) -> None:
        answered(await self._call("gate", self.gate.write(self.token)), 1)


class Pipeline(AsyncRaw):
    """All acquisitions in one pipeline of redis-py's, and all releases in another."""

    async def together(self, names: list[str]) -> None:
        """What ``acquire`` and ``release`` of each name do one by one."""
        pipe: Any = self.client.pipeline(transaction=False)
        wanted = [self.known[name] for name in names]
        for words in wanted:
            first, *rest = words.acquire()
            pipe.evalsha(digest("acquire"), int(first), *rest)
        grants = await pipe.execute()
        for words, reply in zip(wanted, grants, strict=True):
            answered(reply, 1)
            first, *rest = words.release(reply[1])
            pipe.evalsha(digest("release"), int(first), *rest)
        for reply in await pipe.execute():
            answered(reply, 1)
