"""Fenced models: one with relations, one whose field was added without a default, a child's."""

from __future__ import annotations

from django.db import models


class Customer(models.Model):
    """Whose orders there are."""

    name = models.TextField()


class Order(models.Model):
    """An order."""

    customer = models.ForeignKey(Customer, models.CASCADE, null=True)
    status = models.TextField(default="new")
    tries = models.IntegerField(default=0)
    fence_token = models.BigIntegerField(default=0)


class Item(models.Model):
    """A line of an order."""

    order = models.ForeignKey(Order, models.CASCADE)


class Old(models.Model):
    """A row of before there were fences."""

    status = models.TextField(default="new")
    fence = models.BigIntegerField(null=True)
    small = models.IntegerField(default=0)


class Rush(Order):
    """An order whose rest is in a table of its own, with a fence of that table's."""

    courier = models.TextField(default="none")
    rush_fence = models.BigIntegerField(default=0)


class Tag(models.Model):
    """A row that has a proxy."""

    name = models.TextField(default="new")
    fence_token = models.BigIntegerField(default=0)


class ProxyTag(Tag):
    """The same rows."""

    class Meta:
        proxy = True
