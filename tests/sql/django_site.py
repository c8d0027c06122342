"""A Django project as small as it can be, for `test_django.py`; in a process of its own."""

from __future__ import annotations

import os
from typing import Any

import django
from django.conf import settings


class Router:
    """Where reads go; ``reads`` is set by a case that has a replica."""

    reads: str | None = None

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return self.reads

    def allow_relation(self, *objects: Any, **hints: Any) -> bool:
        return True


def setup(url: str) -> None:
    """Configure Django for a database: ``sqlite:FILE`` or ``postgresql://user@host:port/name``."""
    if url.startswith("sqlite:"):
        database: dict[str, Any] = {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": url.removeprefix("sqlite:"),
        }
    else:
        user, _, rest = url.removeprefix("postgresql://").partition("@")
        address, _, name = rest.partition("/")
        host, _, port = address.partition(":")
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": name,
            "USER": user,
            "HOST": host,
            "PORT": port,
        }
    replica = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    settings.configure(
        DATABASES={"default": database, "replica": replica},
        DATABASE_ROUTERS=["tests.sql.django_site.Router"],
        INSTALLED_APPS=["fencekit.django", "tests.sql.django_app"],
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    )
    django.setup()
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "0"
