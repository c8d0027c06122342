"""A fenced model, and one whose field was added without a default."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order."""

    status = models.TextField(default="new")
    tries = models.IntegerField(default=0)
    fence_token = models.BigIntegerField(default=0)


class Old(models.Model):
    """A row of before there were fences."""

    status = models.TextField(default="new")
    fence = models.BigIntegerField(null=True)
    small = models.IntegerField(default=0)
