"""A Django project as small as it can be, for `test_django.py`; in a process of its own."""

from __future__ import annotations

import os
from typing import Any

import django
from django.conf import settings


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
    settings.configure(
        DATABASES={"default": database},
        INSTALLED_APPS=["fencekit.django", "tests.sql.django_app"],
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    )
    django.setup()
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "0"
