"""One proxied connection: two directions of bytes, held, delayed, counted and lost to order.

Everything here runs in the proxy's own event loop; nothing here needs a lock.

Rules of this module:

1. Bytes of one direction leave in the order in which they came, and never before they are due.
2. A connection that lost a reply is never used again: going on would answer the wrong request.
3. What is held back is forwarded when the hold ends, even if its sender is gone by then: that is
   how a paused client's write comes late.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Literal, cast

Then = Literal["cut", "stall"]

_TAIL = 4096  # bytes kept of each connection's requests, and the longest needle


class Rules:
    """What the proxy does to bytes now; shared by its connections and changed in its loop."""

    def __init__(self) -> None:
        self.request_delay = 0.0
        self.reply_delay = 0.0
        self.stalled = False
        self.lose_replies = 0
        self.lose_then: Then = "cut"
        self.swallow: list[Match] = []
        self.hold: list[Match] = []


class Match:
    """A needle to look for in requests, and how often it still counts."""

    def __init__(self, needle: bytes, then: Then, times: int | None) -> None:
        if not 0 < len(needle) <= _TAIL:
            raise ValueError(f"a needle has 1 to {_TAIL} bytes")
        if then not in ("cut", "stall"):
            raise ValueError("then is 'cut' or 'stall'")
        self.needle = needle
        self.then = then
        self.times = times

    def take(self, before: bytes, data: bytes) -> bool:
        """Whether `data` completes the needle; `before` is what came last on the connection."""
        # A needle may come in two pieces; one that was seen whole is not seen again.
        overlap = before[-(len(self.needle) - 1) :] if len(self.needle) > 1 else b""
        if self.times == 0 or self.needle not in overlap + data:
            return False
        if self.times is not None:
            self.times -= 1
        return True


class Counts:
    """What has passed; read from other threads, written in the loop only."""

    def __init__(self) -> None:
        self.connections = 0
        self.request_bytes = 0
        self.reply_bytes = 0
        self.round_trips = 0
        self.recorded: list[bytearray] = []


class Direction:
    """The bytes on their way from one end to the other."""

    def __init__(self, link: Link, delay: Callable[[], float]) -> None:
        self._link = link
        self._delay = delay
        self._waiting: deque[tuple[float, bytes | None]] = deque()
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.target: asyncio.Transport | None = None

    def push(self, data: bytes | None) -> None:
        """Take bytes; None is the end of them."""
        now = self._link.loop.time()
        self._due = max(self._due, now + self._delay())
        self._waiting.append((self._due, data))
        self.pump()

    def pump(self) -> None:
        """Forward what is due, and come back for what is not."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self.target is not None and not self._link.held:
            due, data = self._waiting[0]
            if due > self._link.loop.time():
                self._timer = self._link.loop.call_at(due, self.pump)
                return
            self._waiting.popleft()
            if data is None:
                self.target.close()
            else:
                self.target.write(data)

    def drop(self) -> None:
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()


class End(asyncio.Protocol):
    """One socket of the two."""

    def __init__(
        self,
        connected: Callable[[asyncio.Transport], None],
        received: Callable[[bytes], None],
        lost: Callable[[], None],
    ) -> None:
        self._connected = connected
        self._received = received
        self._lost = lost
        self.opposite: Callable[[], asyncio.Transport | None] = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connected(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        self._received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def pause_writing(self) -> None:
        source = self.opposite()
        if source is not None and not source.is_closing():
            source.pause_reading()

    def resume_writing(self) -> None:
        source = self.opposite()
        if source is not None and not source.is_closing():
            source.resume_reading()


class Link:
    """A client's connection and the one to the server that belongs to it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rules: Rules,
        counts: Counts,
        record: bool,
        gone: Callable[[Link], None],
    ) -> None:
        self.loop = loop
        self._rules = rules
        self._counts = counts
        self._record = record
        self._gone = gone
        self._client: asyncio.Transport | None = None
        self._server: asyncio.Transport | None = None
        self._requests = Direction(self, lambda: rules.request_delay)
        self._replies = Direction(self, lambda: rules.reply_delay)
        self._stalled = False  # this connection alone, whatever the proxy does
        self._mute = False  # a reply was lost here: see rule 2
        self._lose_next: Then | None = None
        self._asking = False  # a burst of requests is going on, no reply since
        self._tail = b""
        self._closed = False
        self.front = End(self._client_made, self._request, self._client_lost)
        self.back = End(self._server_made, self._reply, self._server_lost)
        self.front.opposite = lambda: self._server
        self.back.opposite = lambda: self._client

    @property
    def held(self) -> bool:
        return self._rules.stalled or self._stalled or self._mute

    def flow(self) -> None:
        """End every hold; a connection that lost a reply is closed instead."""
        if self._mute:
            self.cut()
            return
        self._stalled = False
        self._requests.pump()
        self._replies.pump()

    def cut(self) -> None:
        """Close both ends now, with whatever was on the way."""
        self._closed = True
        self._requests.drop()
        self._replies.drop()
        for end in (self._client, self._server):
            if end is not None:
                end.abort()
        self._gone(self)

    def forget(self) -> None:
        """Count the request that comes next as a new burst."""
        self._asking = False

    # -- the client's side -----------------------------------------------------------------------

    def _client_made(self, transport: asyncio.Transport) -> None:
        if self._closed:
            transport.abort()
            return
        self._client = self._replies.target = transport
        self._counts.connections += 1

    def _request(self, data: bytes) -> None:
        self._counts.request_bytes += len(data)
        if not self._asking:
            self._asking = True
            self._counts.round_trips += 1
            if self._record:
                self._counts.recorded.append(bytearray())
        if self._record:
            self._counts.recorded[-1] += data
        self._look(data)
        self._requests.push(data)

    def _look(self, data: bytes) -> None:
        before, self._tail = self._tail, (self._tail + data)[-_TAIL:]
        for match in self._rules.hold:
            if match.take(before, data):
                self._stalled = True
        for match in self._rules.swallow:
            if match.take(before, data):
                self._lose_next = match.then

    def _client_lost(self) -> None:
        self._client = self._replies.target = None
        self._replies.drop()
        self._requests.push(None)
        self._done()

    # -- the server's side -----------------------------------------------------------------------

    def _server_made(self, transport: asyncio.Transport) -> None:
        if self._closed:
            transport.abort()
            return
        self._server = self._requests.target = transport
        self._requests.pump()

    def _reply(self, data: bytes) -> None:
        self._asking = False
        self._counts.reply_bytes += len(data)
        if self._mute:
            return
        then = self._lose_next
        if then is None and self._rules.lose_replies > 0:
            self._rules.lose_replies -= 1
            then = self._rules.lose_then
        if then is None:
            self._replies.push(data)
            return
        self._mute = True
        if then == "cut":
            self.cut()

    def _server_lost(self) -> None:
        self._server = self._requests.target = None
        self._requests.drop()
        self._replies.push(None)
        self._done()

    def _done(self) -> None:
        if self._client is None and self._server is None:
            self._gone(self)
