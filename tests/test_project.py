"""What holds for the project as a whole: versions, layers, names, and what importing costs."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fencekit

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fencekit"

# DESIGN.md, section 3. A module imports only from rows above its own, and a directory from
# itself. Of the twins, the blocking one knows nothing of the other; the asynchronous one may
# lend a thread of it.
LAYERS = (
    ("_version", "errors"),
    ("records", "events"),
    ("_canonical", "_codec", "_commands"),
    ("_target",),
    ("keys",),
    ("fencing", "_updates"),
    ("_policy",),
    ("_lease", "_terms"),
    ("_scripts",),
    ("_replies",),
    ("_seam",),
    ("_sync",),
    ("_async",),
)
# Built on the public names alone, so that anybody could have written them.
INTEGRATIONS = {"celery", "cli", "django", "fastapi", "otel", "sql", "testing"}
# Too heavy, or too often absent, to come with `import fencekit`.
HEAVY = ("celery", "django", "fastapi", "opentelemetry", "pytest", "rich", "sqlalchemy")


def modules() -> dict[str, Path]:
    """Every module of the package, by its full name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("fencekit", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def part(module: str) -> str:
    """The module or directory right below `fencekit` that holds this module."""
    return module.split(".")[1] if "." in module else ""


def imports(module: str, path: Path) -> Iterator[tuple[int, str]]:
    """The line and the full dotted name of each of fencekit's names that a module imports.

    What only a type checker sees is not an import: it costs nothing and closes no circle.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in _run_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "fencekit":
                yield node.lineno, name


def _run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from (other, *_run_nodes(other))
        else:
            yield from (node, *_run_nodes(node))


def wrong_imports() -> Iterator[str]:
    rows = {name: number for number, row in enumerate(LAYERS) for name in row}
    known = modules()
    for module, path in known.items():
        own = part(module)
        if own in ("", "__main__"):
            continue
        for line, name in imports(module, path):
            # `from fencekit import x` names the module x where there is one.
            target = part(name) if f"fencekit.{part(name)}" in known else ""
            place = f"{path.relative_to(ROOT)}:{line} imports {name}"
            if target == own:
                continue
            if own in INTEGRATIONS:
                public = part(name) in fencekit.__all__
                if not public and any(word.startswith("_") for word in name.split(".")):
                    yield f"{place}, which is private"
                elif not target and not public:
                    yield f"{place}, which is not in fencekit.__all__"
            elif not target:
                yield f"{place}, which is above it"
            elif rows.get(target, len(LAYERS)) >= rows.get(own, 0):
                yield f"{place}, which is not below it"


def tracked() -> list[Path]:
    """The files that a commit of everything would hold."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not in a git checkout")
    paths = (ROOT / name for name in listed.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]


def test_version_is_the_top_of_the_changelog() -> None:
    top = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert top is not None
    assert top[1] == fencekit.__version__


def test_every_module_has_a_layer() -> None:
    known = {name for row in LAYERS for name in row} | INTEGRATIONS | {"", "__main__"}
    assert {part(module) for module in modules()} <= known


def test_imports_run_one_way() -> None:
    assert list(wrong_imports()) == []


def test_walk_sees_every_kind_of_import(tmp_path: Path) -> None:
    path = tmp_path / "lock.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "import redis, fencekit.sql\n"
        "from . import guard\n"
        "from .. import keys\n"
        "from ..errors import LeaseLost\n"
        "def late():\n"
        "    from fencekit import AsyncGuard\n"
        "if TYPE_CHECKING:\n"
        "    from fencekit.celery import QueueOnce\n"
        "else:\n"
        "    from fencekit.records import Claim\n"
    )
    assert list(imports("fencekit._async.lock", path)) == [
        (2, "fencekit.sql"),
        (3, "fencekit._async.guard"),
        (4, "fencekit.keys"),
        (5, "fencekit.errors.LeaseLost"),
        (7, "fencekit.AsyncGuard"),
        (11, "fencekit.records.Claim"),
    ]


def test_importing_fencekit_imports_nothing_heavy() -> None:
    # What redis-py takes along where it is installed is not ours to count.
    program = (
        "import anyio, redis.asyncio, sys; before = set(sys.modules); import fencekit;"
        f"print(*sorted((set(sys.modules) - before) & set({HEAVY!r})))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_public_names_exist_sorted_once() -> None:
    assert list(fencekit.__all__) == sorted(set(fencekit.__all__))
    assert [name for name in fencekit.__all__ if not hasattr(fencekit, name)] == []


def test_every_public_name_says_what_it_promises() -> None:
    silent = []
    for name in fencekit.__all__:
        public = getattr(fencekit, name)
        if (inspect.isclass(public) or inspect.isroutine(public)) and not public.__doc__:
            silent.append(name)
    assert silent == []


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    # In pieces, or this file would be the first to be found.
    places = "|".join(("home/[a-z]+", "root", "Users/[A-Za-z]+", "work", "tmp/w"))
    machine = re.compile(rf"(?<![\w.)}}])/(?:{places})/")
    found = []
    for path in tracked():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if machine.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []
