"""A TCP proxy that passes, delays, holds and cuts, and loses the replies of what was done.

It runs in a thread of its own, so that sync, asyncio and trio tests use it alike. A method that
changes something returns when the change is in force.
"""

from __future__ import annotations

import asyncio
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from ._binary import ServerError
from ._clients import Clients
from ._loop import LoopThread
from ._process import HOST, free_port
from ._wire import Counts, End, Link, Match, Rules, Then
from .external import ExternalRedis
from .servers import RedisServer


class Proxy(Clients):
    """A network in front of a server that fails when you say so.

    `target_url` lends its database, user and password to `url`. With `record`, the bytes of the
    requests are kept in `requests`.

    >>> from redis.exceptions import ConnectionError
    >>> from fencekit.testing import Proxy, RedisServer
    >>> with RedisServer() as server, Proxy.before(server) as proxy:
    ...     with proxy.client(retry=None) as redis:
    ...         proxy.swallow_matching(b"INCR")
    ...         try:
    ...             redis.incr("n")
    ...         except ConnectionError:
    ...             print("lost, not undone")
    ...     with server.client() as redis:
    ...         redis.get("n")
    lost, not undone
    b'1'
    """

    def __init__(
        self,
        target_host: str,
        target_port: int,
        *,
        target_url: str | None = None,
        record: bool = False,
    ) -> None:
        self.host = HOST
        self._target = (target_host, target_port)
        self._target_url = target_url or "redis://127.0.0.1/0"
        self._record = record
        self._port: int | None = None
        self._rules = Rules()
        self._counts = Counts()
        self._links: set[Link] = set()
        self._thread = LoopThread("fencekit-testing-proxy")
        self._listener: asyncio.Server | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    @classmethod
    def before(cls, server: RedisServer | ExternalRedis, *, record: bool = False) -> Proxy:
        """A proxy in front of a `RedisServer` or an `ExternalRedis`, not yet started."""
        url = server.tcp_url if isinstance(server, RedisServer) else server.url
        return cls(server.host, server.port, target_url=url, record=record)

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> Proxy:
        """Listen, and return when connections are accepted."""
        if not self._thread.running:
            self._thread.start()
            try:
                self._thread.run(self._listen())
            except BaseException:
                self._thread.stop()
                raise
        return self

    def stop(self) -> None:
        """Close everything and end the thread; calling it again does nothing."""
        if self._thread.running:
            self._thread.run(self._shut_down())
            self._thread.stop()

    def __enter__(self) -> Proxy:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # -- facts -----------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """The port to connect to; it stays the same over `refuse` and `accept`."""
        if self._port is None:
            raise ServerError("This proxy has no port yet: start() it first.")
        return self._port

    @property
    def url(self) -> str:
        """The URL for clients: the target's, through the proxy."""
        parts = urlsplit(self._target_url)
        userinfo, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{userinfo}{at}{self.host}:{self.port}"))

    @property
    def connections(self) -> int:
        """How many connections were accepted since the start or `forget`."""
        return self._counts.connections

    @property
    def open_connections(self) -> int:
        """How many of them are open now."""
        return len(self._links)

    @property
    def request_bytes(self) -> int:
        """How many bytes came from clients, held back or not."""
        return self._counts.request_bytes

    @property
    def reply_bytes(self) -> int:
        """How many bytes came from the server, lost or not."""
        return self._counts.reply_bytes

    @property
    def requests(self) -> list[bytes]:
        """The request bytes, one item for each round trip; empty without `record`."""
        return self._thread.call(lambda: [bytes(burst) for burst in self._counts.recorded])

    def round_trips(self) -> int:
        """How many bursts of requests came, each ended by the server's next bytes."""
        return self._counts.round_trips

    def forget(self) -> None:
        """Set the counters to zero and drop what was recorded."""

        def change() -> None:
            counts = self._counts
            counts.connections = counts.request_bytes = counts.reply_bytes = 0
            counts.round_trips = 0
            counts.recorded.clear()
            for link in self._links:
                link.forget()

        self._thread.call(change)

    # -- orders ----------------------------------------------------------------------------------

    def delay(
        self, seconds: float, direction: Literal["both", "request", "reply"] = "both"
    ) -> None:
        """Let bytes that come from now on arrive `seconds` later; zero ends it."""
        if direction not in ("both", "request", "reply"):
            raise ValueError("direction is 'both', 'request' or 'reply'")

        def change() -> None:
            if direction != "reply":
                self._rules.request_delay = seconds
            if direction != "request":
                self._rules.reply_delay = seconds

        self._thread.call(change)

    def cut(self) -> None:
        """Close all present connections, with what is on the way in them; new ones may come."""
        self._thread.call(self._cut)

    def refuse(self) -> None:
        """Refuse new connections; present ones go on."""
        self._thread.call(self._close_listener)

    def accept(self) -> None:
        """Accept new connections again."""
        self._thread.run(self._listen())

    def stall(self) -> None:
        """Hold back all bytes with the connections open, as a partition does."""
        self._thread.call(lambda: setattr(self._rules, "stalled", True))

    def flow(self) -> None:
        """End `stall` and `stall_matching`: what was held back goes on now, late.

        A connection whose reply was swallowed is closed: its reply stays lost.
        """
        self._thread.call(self._flow)

    def swallow_replies(self, n: int = 1, then: Then = "cut") -> None:
        """Lose the next `n` replies after the server did its work.

        Each loss takes its connection with it: closed (``"cut"``) or silent (``"stall"``). The
        replies to a client's greeting count; `swallow_matching` picks a request.
        """
        if then not in ("cut", "stall"):
            raise ValueError("then is 'cut' or 'stall'")

        def change() -> None:
            self._rules.lose_replies, self._rules.lose_then = n, then

        self._thread.call(change)

    def swallow_matching(self, needle: bytes, then: Then = "cut", times: int | None = None) -> None:
        """Pass on requests that contain `needle`, and lose the reply that comes next.

        `times` limits it to the first so many requests; None means until `reset`.
        """
        match = Match(needle, then, times)
        self._thread.call(lambda: self._rules.swallow.append(match))

    def stall_matching(self, needle: bytes, times: int | None = None) -> None:
        """Hold the connection on which a request contains `needle`, that request included.

        Other connections pass. `flow` lets the request through, `cut` drops it.
        """
        match = Match(needle, "stall", times)
        self._thread.call(lambda: self._rules.hold.append(match))

    def reset(self) -> None:
        """Pass everything again: no delay, no rule, nothing held, new connections accepted."""

        def change() -> None:
            self._rules.request_delay = self._rules.reply_delay = 0.0
            self._rules.lose_replies = 0
            self._rules.swallow.clear()
            self._flow()

        self._thread.call(change)
        self.accept()

    def __repr__(self) -> str:
        host, port = self._target
        return f"<Proxy {self.host}:{self._port} before {host}:{port}>"

    # -- in the loop -----------------------------------------------------------------------------

    async def _listen(self) -> None:
        if self._listener is not None:
            return
        loop = asyncio.get_running_loop()
        for attempt in range(20):
            port = self._port or free_port()
            try:
                self._listener = await loop.create_server(self._accepted, self.host, port)
            except OSError:
                if attempt == 19:
                    raise
                await asyncio.sleep(0.05)
            else:
                self._port = port
                return

    def _accepted(self) -> End:
        loop = asyncio.get_running_loop()
        link = Link(loop, self._rules, self._counts, self._record, self._links.discard)
        self._links.add(link)
        task = loop.create_task(self._connect(link))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return link.front

    async def _connect(self, link: Link) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: link.back, *self._target)
        except OSError:
            link.cut()

    def _cut(self) -> None:
        for link in tuple(self._links):
            link.cut()

    def _flow(self) -> None:
        self._rules.stalled = False
        self._rules.hold.clear()
        for link in tuple(self._links):
            link.flow()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _shut_down(self) -> None:
        self._close_listener()
        for task in tuple(self._connecting):
            task.cancel()
        if self._connecting:
            await asyncio.wait(self._connecting)
        # What was being accepted has no transport yet, and an aborted one closes its socket in the
        # next round.
        for _ in range(5):
            self._cut()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
