"""Querysets, transactions and operations in Django. Each run of it is a process of its own, since
Django's settings are a process's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_django(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    # scenarios 82, 83, 86 and 88, in tests/sql/django_cases.py
    if database == "sqlite":
        url = f"sqlite:{tmp_path / 'test.db'}"
    else:
        url = request.getfixturevalue("fencekit_postgres").url
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP DATABASE IF EXISTS django")
            connection.execute("CREATE DATABASE django")
        url = url.rpartition("/")[0] + "/django"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.sql.django_cases", url],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = done.stdout.split()
    assert len(ran) == len(cases()), done.stdout


def cases() -> list[Any]:
    source = (ROOT / "tests" / "sql" / "django_cases.py").read_text()
    return [
        line for line in source.splitlines() if line.startswith(("def case_", "async def case_"))
    ]
