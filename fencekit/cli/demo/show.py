"""Runs the demo from beginning to end: server, workers, screen, page, exit status."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from redis.exceptions import RedisError

from fencekit import FenceKitError
from fencekit.testing import ExternalRedis, RedisServer, ServerError, open_server

from . import screen, words
from .crew import WorkerFailed, WorkerProcess
from .story import Story, prepare
from .timeline import Event, Run, Verdict, judge
from .worker import KEEP, Setup


class CannotRun(Exception):
    """The demo cannot run here; the message says why and what to do."""


def show(*, url: str | None, safe: bool, page: str | None, plain: bool, lease: float) -> int:
    """Run the demo and return the exit status that its help promises."""
    try:
        with _ended_by_signals():
            _check_place(page)
            with _server(url) as server:
                run, verdict = _run(server, safe, screen.choose(plain=plain), lease)
            if page is not None:
                _write_page(page, run, verdict)
            return 0 if verdict.ok else 1
    except (CannotRun, ServerError, WorkerFailed, RedisError, FenceKitError) as error:
        print(f"fencekit demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; nothing more may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(
    server: RedisServer | ExternalRedis, safe: bool, shown: screen.Screen, lease: float
) -> tuple[Run, Verdict]:
    narrator = words.Narrator(safe=safe, lease=lease)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fencekit-demo-")))
        setup = Setup(
            name="A",
            safe=safe,
            url=server.url,
            cluster=_is_cluster(server),
            prefix=f"fencekit-demo-{secrets.token_hex(6)}",
            database=str(folder / "orders.sqlite3"),
            lease=lease,
        )
        prepare(setup.database)
        client = stack.enter_context(contextlib.closing(setup.connect()))
        stack.callback(_remove_keys, client, setup.prefix, cluster=setup.cluster)
        crew = [
            stack.enter_context(_worker(replace(setup, name=name), folder)) for name in ("A", "B")
        ]
        for worker in crew:
            worker.ready()
        pids = {worker.name: worker.pid for worker in crew}
        place = _place(server)
        shown.open(words.TITLE[safe], words.INTRO[safe], _where(place, pids))

        def tell(event: Event) -> None:
            shown.line(narrator.line(event))

        story = Story(client, setup, crew[0], crew[1], tell)
        story.play()
        run = Run(safe, lease, tuple(story.events), story.stored(), pids, place)
        for worker in crew:
            worker.end(patience=2.0)
    verdict = judge(run)
    shown.close(verdict)
    return run, verdict


@contextlib.contextmanager
def _worker(setup: Setup, folder: Path) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(setup, folder)
    try:
        yield worker
    finally:
        worker.end()


@contextlib.contextmanager
def _server(url: str | None) -> Iterator[RedisServer | ExternalRedis]:
    """The private server, or the user's if it answers."""
    if not hasattr(signal, "SIGSTOP"):
        raise CannotRun("it freezes a process with SIGSTOP, which this system does not have")
    if url is not None:
        server = ExternalRedis(url)
        _ping(server)
        yield server
        return
    with open_server() as found:
        if isinstance(found, ExternalRedis):
            _ping(found)
        yield found


def _ping(server: ExternalRedis) -> None:
    try:
        with server.client(socket_connect_timeout=5, socket_timeout=5) as client:
            client.ping()
    except (RedisError, OSError, ValueError) as error:
        raise CannotRun(f"no Redis to work with at {_address(server)}: {error}") from None


def _is_cluster(server: RedisServer | ExternalRedis) -> bool:
    try:
        with server.client() as client:
            info: Any = client.info("cluster")
    except RedisError:  # not everybody may ask
        return False
    return bool(info.get("cluster_enabled"))


def _address(server: ExternalRedis) -> str:
    return repr(server).strip("<>").split(" ", 1)[1]


def _place(server: RedisServer | ExternalRedis) -> str:
    try:
        kind = f"{server.name} {'.'.join(map(str, server.version))}"
    except (RedisError, KeyError):
        kind = "a server"
    if isinstance(server, ExternalRedis):
        return f"{kind} at {_address(server)}"
    return f"{kind}, a private one that is gone after this"


def _where(place: str, pids: dict[str, int]) -> str:
    workers = ", ".join(f"{name} {pid}" for name, pid in pids.items())
    return f"Server: {place}. Processes: {workers}."


def _remove_keys(client: Any, prefix: str, *, cluster: bool) -> None:
    """Leave nothing in somebody's server. A huge one is not searched for ever: all keys expire."""
    until = time.monotonic() + 5
    with contextlib.suppress(RedisError):
        primaries = client.get_primaries() if cluster else ()
        nodes = [node.redis_connection for node in primaries] or [client]
        for node in nodes:
            cursor = -1
            while cursor and time.monotonic() < until:
                cursor, keys = node.scan(max(0, cursor), match=f"{prefix}:*", count=1000)
                for key in keys:
                    node.delete(key)
        if time.monotonic() < until:
            return
    print(f"fencekit demo: keys {prefix}:* may be left; they expire within {KEEP:.0f} s",
          file=sys.stderr)  # fmt: skip


def _check_place(page: str | None) -> None:
    """Find out before the show that the page could not be written after it."""
    if page is None:
        return
    path = Path(page)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise CannotRun(f"cannot write {page}: it is a folder, or its folder does not exist")


def _write_page(page: str, run: Run, verdict: Verdict) -> None:
    from .page import render

    try:
        Path(page).write_text(render(run, verdict), encoding="utf-8")
    except OSError as error:
        raise CannotRun(f"cannot write {page}: {error.strerror}") from None
    print(f"Wrote {page}", flush=True)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """What ends us unwinds us first, so that no frozen process and no server is left."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals, and only it is interrupted by them
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
