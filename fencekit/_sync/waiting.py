"""Waiting for a release or a result without asking again and again.

Rules this module obeys:

* Subscribe first, then ask again, then sleep: a release between two steps is not missed.
* One subscription connection for all waiters of a client.
* Waiters for a lock stand in line; only the first asks the server, so a release wakes one. Waiters
  for a result are all woken.
* Without a subscription the first in line asks again after growing pauses.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from fencekit import _policy
from fencekit._seam import threads as seam
from fencekit.events import logger

LINGER = 5.0
"""Seconds for which an idle subscription is kept for the next waiter."""

PROBE = 15.0
"""Seconds of silence after which the subscription is asked whether it is alive."""

PATIENCE = 0.1
"""Seconds for which the first in line waits for the subscription before it asks without."""

SAFETY = 30.0
"""The longest sleep: what frees a lock without a message (a flush) is noticed after it."""


class Place:
    """One waiter's place in a line."""

    def __init__(self, channel: bytes) -> None:
        self.channel = channel
        self.event = seam.Event()
        self.news = False
        self.ask_at = _policy.now() + PATIENCE


class _Queue:
    def __init__(self, everyone: bool) -> None:
        self.places: deque[Place] = deque()
        self.everyone = everyone
        self.confirmed = False

    def asks(self, place: Place) -> bool:
        """Whether it is this place's turn to ask the server."""
        return self.everyone or self.places[0] is place

    def asking(self) -> list[Place]:
        return list(self.places) if self.everyone else [self.places[0]] if self.places else []

    def tell(self) -> None:
        """There is news: whoever may ask asks now."""
        for place in self.asking():
            place.news = True
            place.event.set()


class WaitingRoom:
    """All who wait for something on one server."""

    def __init__(self, link: seam.Link) -> None:
        self._link = link
        self._mutex = _policy.Mutex()
        self._queues: dict[bytes, _Queue] = {}
        self._line: Any = None
        self._worker: seam.Worker | None = None
        self.owner: object = None
        self._failures = 0
        self._idle_since = 0.0

    def occupied(self, channel: bytes) -> bool:
        """Whether somebody here is in line already; then asking out of turn would be unfair."""
        return channel in self._queues

    def join(self, channel: bytes, *, everyone: bool = False) -> Place:
        """Take the last place in line."""
        place = Place(channel)
        with self._mutex:
            queue = self._queues.get(channel)
            if queue is None:
                queue = self._queues[channel] = _Queue(everyone)
                if self._line is not None:
                    self._line.post(b"SUBSCRIBE", channel)
            queue.places.append(place)
            place.news = queue.confirmed and queue.asks(place)
            if self._worker is None or not self._worker.alive:
                self._failures = 0
                self._worker = seam.Worker(self._run, "waiting")
        return place

    def leave(self, place: Place, *, ask_at: float = 0.0) -> None:
        """Leave the line; after the first place, the next one asks at `ask_at` or when woken."""
        with self._mutex:
            queue = self._queues[place.channel]
            first = queue.places[0] is place
            queue.places.remove(place)
            if queue.places:
                if first and not queue.everyone:
                    queue.places[0].ask_at = ask_at
                    queue.places[0].event.set()
                return
            del self._queues[place.channel]
            self._idle_since = _policy.now()
            if self._line is not None:
                self._line.post(b"UNSUBSCRIBE", place.channel)

    def turn(self, place: Place, until: float, ask_in: float | None = None) -> bool:
        """Sleep until it makes sense to ask (again); False when `until` comes first.

        `ask_in` is the time the lease has left that the last question met.
        """
        if ask_in is not None:
            place.ask_at = _policy.now() + min(ask_in, SAFETY)
        while True:
            moment = _policy.now()
            with self._mutex:
                place.event.clear()
                queue = self._queues[place.channel]
                asks = queue.asks(place)
                if asks and not queue.confirmed:
                    pause = _policy.pause(self._failures, base=PATIENCE)
                    place.ask_at = min(place.ask_at, moment + pause)
                if asks and (place.news or place.ask_at <= moment):
                    place.news = False
                    place.ask_at = moment + SAFETY
                    return True
            if moment >= until:
                return False
            wake_at = min(until, place.ask_at) if asks else until
            place.event.wait(None if wake_at == float("inf") else wake_at - moment)

    def _run(self) -> None:
        while True:
            try:
                self._line = self._link.open_line()
                self._listen()
            except Exception as error:
                self._failures += 1
                logger.info("the subscription of waiting callers broke: %s", error)
            finally:
                self._hang_up()
            if self._finished():
                return
            seam.sleep(_policy.pause(self._failures, base=0.05))

    def _listen(self) -> None:
        """Pass messages on until nobody waits any more."""
        with self._mutex:
            if self._queues:
                self._line.post(b"SUBSCRIBE", *self._queues)
        probed = False
        heard = _policy.now()
        while True:
            message = self._line.read(LINGER)
            if message is not None:
                heard, probed, self._failures = _policy.now(), False, 0
                self._hear(message)
            elif not self._queues and _policy.now() - self._idle_since >= LINGER:
                return
            elif _policy.now() - heard >= PROBE:
                if probed:
                    raise RedisConnectionError("the subscription does not answer")
                probed = True
                self._line.post(b"PING")

    def _hear(self, message: Any) -> None:
        kind, channel = message[0], message[1]
        with self._mutex:
            queue = self._queues.get(channel)
            if queue is None:
                return
            if kind == b"subscribe":
                queue.confirmed = True
            elif kind != b"message":
                return
            queue.tell()

    def _finished(self) -> bool:
        """Whether the worker may end; from here on the next waiter starts another."""
        with self._mutex:
            if self._queues:
                return False
            self._worker = None
            return True

    def _hang_up(self) -> None:
        with self._mutex:
            line, self._line = self._line, None
            for queue in self._queues.values():
                queue.confirmed = False
                for place in queue.asking():
                    place.event.set()
        if line is not None:
            line.close()
