"""Fenced models: one with relations, one whose field was added without a default, a child's, one
whose fields are of many kinds."""

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


class Shelf(models.Model):
    """A row with fields that are no columns, or that the database computes."""

    owners = models.ManyToManyField(Customer)
    made = models.DateTimeField(null=True)
    tries = models.IntegerField(default=0)
    fence_token = models.BigIntegerField(default=0)
    if hasattr(models, "GeneratedField"):  # since Django 5
        doubled = models.GeneratedField(
            expression=models.F("tries") * 2,
            output_field=models.BigIntegerField(),
            db_persist=True,
        )

    @property
    def label(self) -> str:
        return f"shelf {self.pk}"
