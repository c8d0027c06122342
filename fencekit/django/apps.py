"""The Django app with fencekit's two tables."""

from __future__ import annotations

from django.apps import AppConfig


class FenceKitConfig(AppConfig):
    """What ``INSTALLED_APPS`` finds under ``"fencekit.django"``."""

    name = "fencekit.django"
    label = "fencekit"
    verbose_name = "fencekit"
    default_auto_field = "django.db.models.BigAutoField"
