"""Every example with a prompt (>>>) in docstrings and pages runs, in both halves.

Examples in the asynchronous half use `await` at top level, which doctest's own runner cannot, so
this one compiles each example with top-level await allowed. Names that examples may use: client,
lock, guard, gate (of the half that the module belongs to), redis_url and fencekit's public names.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import importlib
import inspect
import io
import pkgutil
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

import fencekit
import fencekit.django
import fencekit.sql
from fencekit.testing import RedisServer
from tests import aio, threads
from tests.site import Site

ROOT = Path(__file__).resolve().parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
CHECKER = doctest.OutputChecker()


def modules() -> list[str]:
    found = pkgutil.walk_packages(fencekit.__path__, "fencekit.")
    names = ["fencekit", *(module.name for module in found)]
    # Django lets its models be imported in a project only; they have no examples.
    return sorted(name for name in names if not name.endswith(("__main__", ".django.models")))


def examples_of(module: Any) -> Iterator[doctest.DocTest]:
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, module.__name__):
        if test.examples:
            yield test


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Half:
    """The names that examples use, and how to run one line of them."""

    def __init__(self, name: str, server: RedisServer) -> None:
        self.loop = asyncio.new_event_loop() if name == "async" else None
        kind: Any = aio if name == "async" else threads
        site = Site.at(server)
        self.client = kind.client_of(site, decode_responses=False)
        site.close()
        prefix = "Async" if name == "async" else ""
        lock = fencekit.AsyncLock if prefix else fencekit.DistributedLock
        guard = fencekit.AsyncGuard if prefix else fencekit.IdempotencyGuard
        gate = fencekit.AsyncFenceGate if prefix else fencekit.FenceGate
        self.names: dict[str, Any] = {name: getattr(fencekit, name) for name in fencekit.__all__}
        self.names.update(
            client=self.client,
            lock=lock(self.client),
            guard=guard(self.client),
            gate=gate(self.client),
            redis_url=server.url,
        )

    def run(self, source: str, names: dict[str, Any], where: str) -> None:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if self.loop else 0
        code = compile(source, where, "single", flags)
        if code.co_flags & inspect.CO_COROUTINE:
            assert self.loop is not None
            self.loop.run_until_complete(eval(code, names))
        else:
            exec(code, names)

    def close(self) -> None:
        if self.loop is None:
            self.client.close()
            return
        self.loop.run_until_complete(aio.close(self.client))
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.close()


def run_examples(test: doctest.DocTest, half: Half) -> int:
    """Run every example of one text; returns how many."""
    names = {**half.names, **test.globs}
    try:
        return _run_examples(test, half, names)
    finally:
        for value in names.values():
            if isinstance(value, Engine):  # a database in memory is closed with it
                value.dispose()


def _run_examples(test: doctest.DocTest, half: Half, names: dict[str, Any]) -> int:
    for example in test.examples:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            try:
                half.run(example.source, names, f"<{test.name}>")
            except (Exception, SystemExit) as error:
                if example.exc_msg is None:
                    raise AssertionError(f"{test.name}: {example.source}") from error
                got = "".join(traceback.format_exception_only(type(error), error))
                assert CHECKER.check_output(example.exc_msg, got, FLAGS), got
                continue
        assert example.exc_msg is None, f"{test.name}: {example.source} raised nothing"
        got = out.getvalue()
        fine = CHECKER.check_output(example.want, got, FLAGS)
        assert fine, f"{test.name}: {example.source}wanted {example.want}got {got}"
    return len(test.examples)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def halves(server: RedisServer) -> Iterator[dict[str, Half]]:
    with server.client() as admin:
        admin.flushall()
    made = {name: Half(name, server) for name in ("async", "sync")}
    yield made
    for half in made.values():
        half.close()


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings(name: str, halves: dict[str, Half]) -> None:
    module = importlib.import_module(name)
    half = halves["async" if "._async" in name else "sync"]
    for test in examples_of(module):
        run_examples(test, half)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_examples_on_pages(page: Path, halves: dict[str, Half]) -> None:
    """Prompts are checked like docstrings; a page with `await` in them is the async half's."""
    text = page.read_text("utf-8")
    half = halves["async" if re.search(r"^\s*(>>>|\.\.\.) .*\bawait\b", text, re.M) else "sync"]
    blocks = "\n".join(re.findall(r"^```(?:python|pycon)\n(.*?)^```", text, re.M | re.S))
    test = doctest.DocTestParser().get_doctest(blocks, {}, page.name, str(page), 0)
    run_examples(test, half)


def test_every_public_class_and_function_has_an_example() -> None:
    missing = []
    public_names = [(fencekit, name) for name in fencekit.__all__]
    for module in (fencekit.sql, fencekit.django):
        public_names += [(module, name) for name in module.__all__]
    for module, name in public_names:
        thing = getattr(module, name)
        if inspect.isfunction(thing) and ">>>" not in (thing.__doc__ or ""):
            missing.append(name)
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            for verb, function in vars(thing).items():
                public = inspect.isfunction(function) and not verb.startswith("_")
                ours = name.startswith(("Async", "Distributed", "Idempotency", "FenceGate"))
                if public and ours and ">>>" not in (function.__doc__ or ""):
                    missing.append(f"{name}.{verb}")
    assert missing == []


def test_the_readme_example_runs_as_it_stands(server: RedisServer) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    (block,) = (found for found in blocks if "r = Redis" in found)
    source = block.replace("redis://localhost:6379/0", server.url)
    assert source != block
    names: dict[str, Any] = {}
    exec(compile(source, "README.md", "exec"), names)
    assert names["guard"].status(names["key"]) == "done"
    assert names["r"].get("analysis:batch-42:status") == "running"
    names["r"].close()
