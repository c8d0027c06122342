"""generate_sync.py notices every way in which a twin and its source can part.

All but the last test work on a small tree with rules of its own, so that a change of the
real rules, or of the real sources, touches none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import generate_sync
from generate_sync import Rule

RULES = (
    Rule(r"\b_async\b", "_sync"),
    Rule(r"Async(?=[A-Z])", ""),
    Rule(r"\basync (def|with|for)\b", r"\1"),
    Rule(r"\bawait ", ""),
)

SOURCE = '''\
"""A pair of twins."""

from fencekit._async.other import AsyncThing


async def use(thing: AsyncThing) -> None:
    async with thing as opened:
        await opened.go()
'''

TWIN = '''\
"""A pair of twins."""

from fencekit._sync.other import Thing


def use(thing: Thing) -> None:
    with thing as opened:
        opened.go()
'''

Generate = Callable[..., tuple[int, str]]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with one module, in a folder of it, and one test, both generated already."""
    for name in ("fencekit/_async/deep/use.py", "tests/_async/test_use.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(SOURCE)
    assert generate_sync.main([], root=tmp_path, rules=RULES) == 0
    return tmp_path


@pytest.fixture
def generate(tree: Path, capsys: pytest.CaptureFixture[str]) -> Generate:
    """The script's exit status and everything it printed."""

    def run(*argv: str, rules: tuple[Rule, ...] = RULES) -> tuple[int, str]:
        status = generate_sync.main(argv, root=tree, rules=rules)
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def test_twin_holds_the_source_line_by_line(tree: Path, generate: Generate) -> None:
    assert (tree / "fencekit/_sync/deep/use.py").read_text() == TWIN
    assert (tree / "tests/_sync/test_use.py").read_text() == TWIN
    assert generate("--check") == (0, "")


def test_writing_twice_touches_nothing(tree: Path, generate: Generate) -> None:
    twin = tree / "tests/_sync/test_use.py"
    before = twin.stat().st_mtime_ns
    assert generate() == (0, "")
    assert twin.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        pytest.param(b"go()", b"gone()", "-        opened.gone()\n+        opened.go()", id="byte"),
        pytest.param(b"go()\n", b"go()", "         opened.go()\n+\n", id="last newline"),
        pytest.param(b"go()\n", b"go()\r\n", "-        opened.go()\\r\n", id="line ending"),
        pytest.param(b"\n\n\n", b"\n\n", "\n+\n", id="line dropped"),
        pytest.param(b"\n\n", b"\n# more\n\n", "-# more\n", id="line added"),
        pytest.param(b"A pair", b"A \xff pair", '-"""A \ufffd pair', id="not text"),
    ],
)
def test_changed_twin_is_shown_as_a_diff(
    tree: Path, generate: Generate, old: bytes, new: bytes, shown: str
) -> None:
    twin = tree / "fencekit/_sync/deep/use.py"
    twin.write_bytes(twin.read_bytes().replace(old, new, 1))
    status, output = generate("--check")
    assert status == 1
    assert output.startswith("different file: fencekit/_sync/deep/use.py\n--- ")
    assert shown in output
    assert output.endswith("To fix: python generate_sync.py\n")


def test_changed_source_is_a_difference(tree: Path, generate: Generate) -> None:
    source = tree / "tests/_async/test_use.py"
    source.write_text(source.read_text().replace("go()", "come()"))
    status, output = generate("--check")
    assert status == 1
    assert "+        opened.come()" in output


def test_missing_twin_is_named(tree: Path, generate: Generate) -> None:
    (tree / "fencekit/_sync/deep/use.py").unlink()
    status, output = generate("--check")
    assert status == 1
    assert "missing file: fencekit/_sync/deep/use.py\n" in output
    assert "To fix: python generate_sync.py" in output


@pytest.mark.parametrize("name", ["tests/_sync/test_old.py", "fencekit/_sync/deep/notes.txt"])
def test_extra_file_is_named(tree: Path, generate: Generate, name: str) -> None:
    (tree / name).write_text("")
    status, output = generate("--check")
    assert status == 1
    assert f"extra file: {name}\n" in output


def test_compiled_files_are_no_extra_files(tree: Path, generate: Generate) -> None:
    cache = tree / "fencekit/_sync/__pycache__"
    cache.mkdir()
    (cache / "use.cpython-310.pyc").write_bytes(b"")
    assert generate("--check") == (0, "")


def test_check_writes_nothing_and_writing_repairs(tree: Path, generate: Generate) -> None:
    changed, missing = tree / "fencekit/_sync/deep/use.py", tree / "tests/_sync/test_use.py"
    extra = tree / "tests/_sync/test_old.py"
    changed.write_text("changed")
    missing.unlink()
    extra.write_text("")
    assert generate("--check")[0] == 1
    assert (changed.read_text(), missing.exists(), extra.exists()) == ("changed", False, True)
    assert generate() == (0, "")
    assert (changed.read_text(), missing.read_text(), extra.exists()) == (TWIN, TWIN, False)


@pytest.mark.parametrize("argv", [[], ["--check"]])
def test_unused_rule_is_an_error(generate: Generate, argv: list[str]) -> None:
    status, output = generate(*argv, rules=(*RULES, Rule("never there", "x")))
    assert (status, output) == (1, "unused rule: 'never there' -> 'x'\n")


def test_rule_emptied_by_an_earlier_one_is_unused(generate: Generate) -> None:
    status, output = generate("--check", rules=(*RULES, Rule(r"\bAsyncThing\b", "Thing")))
    assert status == 1
    assert "unused rule: '\\\\bAsyncThing\\\\b'" in output


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("value = (await\n    thing)", "await"),
        ("import asyncio", "asyncio"),
        ("with anyio.fail_after(1):", "anyio"),
        ("kind = Awaitable[int]", "Awaitable"),
        ("def __aenter__(self): ...", "__aenter"),
        ("# the async way", "async"),
    ],
)
def test_leftover_async_word_is_an_error(
    tree: Path, generate: Generate, line: str, word: str
) -> None:
    source = tree / "fencekit/_async/deep/use.py"
    source.write_text(line + "\n" + source.read_text())
    status, output = generate()
    assert status == 1
    assert f"fencekit/_sync/deep/use.py:1: '{word}' left over: {line.splitlines()[0]}" in output
    assert generate("--check") == (1, output)


def test_rule_that_adds_a_line_is_an_error(generate: Generate) -> None:
    rules = (*RULES, Rule(r"opened\.go", "opened\n.go"))
    status, output = generate("--check", rules=rules)
    assert status == 1
    assert "fencekit/_sync/deep/use.py:8: a rule changed the line count" in output


def test_directory_without_sources_is_an_error(tree: Path, generate: Generate) -> None:
    (tree / "tests/_async/test_use.py").unlink()
    status, output = generate("--check")
    assert status == 1
    assert "no sources in tests/_async\n" in output
    assert "extra file: tests/_sync/test_use.py\n" in output


def test_committed_twins_are_what_their_sources_make(capsys: pytest.CaptureFixture[str]) -> None:
    status = generate_sync.main(["--check"])
    assert status == 0, capsys.readouterr().err
