"""Where contenders run: this Python with the checkout, and environments that are made on first use.

Peers need versions that do not go together, and the published fencekit must not meet the checkout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE / ".envs"
PATIENCE = 300


@dataclass(frozen=True)
class Environment:
    """What is installed together. Without requirements it is the Python that runs this."""

    name: str
    requirements: tuple[str, ...] = ()
    checkout: bool = False

    @property
    def python(self) -> Path:
        if not self.requirements:
            return Path(sys.executable)
        return FOLDER / self.name / ("Scripts" if os.name == "nt" else "bin") / "python"

    def variables(self) -> dict[str, str]:
        """The checkout is on the path only where it belongs."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        if self.checkout:
            clean["PYTHONPATH"] = str(HERE.parent)
        return clean

    def make(self) -> None:
        """Install it unless that was done before. Raises RuntimeError with the last line of why."""
        if not self.requirements:
            return
        mark = FOLDER / f"{self.name}.ready"
        content = "\n".join((sys.version, *self.requirements))
        if mark.exists() and mark.read_text("utf-8") == content:
            return
        print(f"installing the environment {self.name!r} ...", file=sys.stderr, flush=True)
        try:
            venv.create(FOLDER / self.name, clear=True, with_pip=True)
            done = subprocess.run(
                [
                    *(str(self.python), "-m", "pip", "install"),
                    *("--quiet", "--disable-pip-version-check"),
                    *self.requirements,
                ],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise RuntimeError(f"the environment {self.name!r} cannot be made: {error}") from error
        if done.returncode:
            last = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
            raise RuntimeError(f"the environment {self.name!r} cannot be made: {last}")
        mark.write_text(content, "utf-8")

    def versions(self, names: tuple[str, ...]) -> dict[str, str]:
        """Of those distributions, which version is installed."""
        script = (
            "import importlib.metadata as m, json, sys\n"
            "found = {d.metadata['Name'].lower().replace('_', '-'): d.version\n"
            "         for d in m.distributions()}\n"
            "print(json.dumps({n: found.get(n, '') for n in sys.argv[1:]}))"
        )
        done = subprocess.run(
            [str(self.python), "-c", script, *names],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=self.variables(),
        )
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("main", checkout=True),
        Environment(
            "peers",
            (
                *("redis==8.1.0", "anyio", "python-redis-lock", "portalocker", "idemkit"),
                *("aws-lambda-powertools", "boto3", "celery", "celery-once", "celery-singleton"),
            ),
            checkout=True,
        ),
        Environment("pottery", ("redis==8.1.0", "pottery")),
        Environment("mithril", ("mithril-locks",)),
        Environment("redlock", ("redlock-ng",)),
        Environment("published", ("redis==8.1.0", "fencekit==0.6.1")),
    )
}


@dataclass(frozen=True)
class Contender:
    """In which environment a class of ``child/contenders`` runs."""

    environment: str
    where: str

    @property
    def own(self) -> bool:
        """Whether an error of it is an error of this project."""
        return self.where.startswith(("fencekit_", "rows:")) or self.where == "enqueue:Guarded"

    @property
    def peer(self) -> bool:
        """Whether ``--no-peers`` leaves it out."""
        return self.environment != "main"


CONTENDERS = {
    "fencekit": Contender("main", "fencekit_blocking:Blocking"),
    "fencekit await": Contender("main", "fencekit_async:Async"),
    "raw": Contender("main", "limits:Raw"),
    "raw await": Contender("main", "limits:AsyncRaw"),
    "bare": Contender("main", "limits:Bare"),
    "pipeline": Contender("main", "limits:Pipeline"),
    "redis-py Lock": Contender("main", "redis_py:Blocking"),
    "redis-py Lock await": Contender("main", "redis_py:Async"),
    "fencekit 0.6.1": Contender("published", "published:Blocking"),
    "python-redis-lock": Contender("peers", "locks:PythonRedisLock"),
    "portalocker": Contender("peers", "locks:Portalocker"),
    "pottery": Contender("pottery", "locks:Pottery"),
    "mithril-locks": Contender("mithril", "locks:Mithril"),
    "redlock-ng": Contender("redlock", "locks:RedlockNg"),
    "powertools": Contender("peers", "guards:Powertools"),
    "idemkit": Contender("peers", "guards:Idemkit"),
    "idemkit await": Contender("peers", "guards:AsyncIdemkit"),
    "SQL": Contender("main", "rows:Psycopg"),
    "SQL await": Contender("main", "rows:Asyncpg"),
    "celery": Contender("peers", "enqueue:Plain"),
    "celery-once": Contender("peers", "enqueue:Once"),
    "celery-singleton": Contender("peers", "enqueue:Singleton"),
    "fencekit + celery": Contender("peers", "enqueue:Guarded"),
}
