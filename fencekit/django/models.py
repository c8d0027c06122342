"""The two tables as Django's migrations make them; `fencekit.sql` works with the same ones."""

from __future__ import annotations

from django.db import models


class Fence(models.Model):
    """For each resource the newest token that a transaction carried."""

    kind = models.TextField()
    resource = models.TextField()
    token = models.BigIntegerField()
    sequence = models.BigIntegerField(default=0)
    at = models.DateTimeField(db_index=True)

    class Meta:
        db_table = "fencekit_fences"
        constraints = (
            models.UniqueConstraint(fields=("kind", "resource"), name="fencekit_fences_resource"),
        )

    def __str__(self) -> str:
        return f"{self.resource} ({self.kind}): {self.token}"


class Operation(models.Model):
    """For each key that its effect was applied, and its result."""

    key = models.TextField(primary_key=True)
    token = models.BigIntegerField(null=True)
    fingerprint = models.TextField(null=True)
    result = models.TextField(null=True)
    at = models.DateTimeField(db_index=True)

    class Meta:
        db_table = "fencekit_operations"

    def __str__(self) -> str:
        return str(self.key)
