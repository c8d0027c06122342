"""Updates of querysets that pass over rows whose fence is newer, in one statement.

Rules this module obeys:

* The token is compared on the updated rows themselves, never in a subquery: a database that waited
  for a row looks at the row anew, and at no more than that.
* What Django would write as several statements is refused before the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asgiref.sync import sync_to_async
from django.core.exceptions import FieldDoesNotExist, FieldError, ValidationError
from django.db import connections, router, transaction
from django.db.models import Field, Max, Model, Q, QuerySet
from django.db.models.expressions import Col
from django.db.models.lookups import Exact
from django.db.models.sql.where import AND, WhereNode

from fencekit import FencedOutError, FenceToken
from fencekit.django._databases import check_database
from fencekit.fencing import token_value


def fenced_update(
    queryset: QuerySet[Any],
    token: FenceToken | int,
    updates: Mapping[str, Any] | None = None,
    *,
    fence_field: str = "fence_token",
    raise_on_stale: bool = False,
) -> bool:
    """Update the rows of a queryset that are not newer, and return whether any was written.

    The field is a ``BigIntegerField(default=0)``; it becomes the token. NULL is "never fenced",
    in a field that is declared with ``null=True``.
    With ``raise_on_stale`` a row that is newer raises ``FencedOutError``, and none is written; if
    the queryset names a row by its primary key, that is the error's ``key``, and the row counts
    whatever else the queryset asks for.
    Without it a stale row and a missing one are both False, and of many rows some may have been
    passed over.

    Raises ``TypeError`` or ``ValueError`` for a token, queryset, field or value that cannot be
    meant, and ``NotImplementedError`` for a queryset with joins on MySQL.

    >>> from fencekit.django import fenced_update
    >>> def ship(orders, handle):  # Order.objects.filter(pk=7), a LockHandle
    ...     return fenced_update(orders, handle.token, {"status": "shipped"})
    """
    number = token_value(token)
    _check_queryset(queryset)
    if not isinstance(raise_on_stale, bool):
        raise TypeError(f"raise_on_stale is a bool, not {type(raise_on_stale).__name__}")
    model = queryset.model
    fence = _fence(model, fence_field)
    setting = {**_checked(model, updates, fence), fence.name: number}
    fresh = Q(**{f"{fence.name}__lte": number})
    if fence.null:
        fresh |= Q(**{f"{fence.name}__isnull": True})
    # One database for both statements: a replica knows nothing of the row that was just refused.
    database = check_database(
        queryset._db or router.db_for_write(model, **queryset._hints), "the queryset's database"
    )
    rows = _rows(queryset, database)
    queryset._result_cache = None  # as update() does: what it has read is old
    if not raise_on_stale:
        return _updated(rows.filter(fresh), setting)
    key = _key(queryset)
    # What else the queryset says of the row, a newer holder may have changed.
    meant = rows if key is None else model._base_manager.using(database).filter(**key)
    with transaction.atomic(using=database):
        written = _updated(rows.filter(fresh), setting)
        newer = meant.order_by().filter(**{f"{fence.name}__gt": number})
        newest = newer.aggregate(newest=Max(fence.name))["newest"]
        if newest is not None:
            raise _refusal(model._meta.db_table, key, token, newest)
    return written


async def afenced_update(
    queryset: QuerySet[Any],
    token: FenceToken | int,
    updates: Mapping[str, Any] | None = None,
    *,
    fence_field: str = "fence_token",
    raise_on_stale: bool = False,
) -> bool:
    """Do what `fenced_update` does, to be awaited.

    >>> from fencekit.django import afenced_update
    >>> async def ship(orders, handle):
    ...     return await afenced_update(orders, handle.token, {"status": "shipped"})
    """
    return await sync_to_async(fenced_update)(
        queryset, token, updates, fence_field=fence_field, raise_on_stale=raise_on_stale
    )


def _check_queryset(queryset: object) -> None:
    if not isinstance(queryset, QuerySet):
        given = queryset.__name__ if isinstance(queryset, type) else type(queryset).__name__
        raise TypeError(f"queryset is a QuerySet, not {given}: pass .filter(...) or .all() of it")
    query, again = queryset.query, 'pass Model.objects.filter(pk__in=that.values("pk"))'
    if query.combinator:
        raise TypeError(f"queryset is a {query.combinator}, which Django cannot update: {again}")
    if query.is_sliced:
        raise TypeError(f"queryset is a slice, which Django cannot update: {again}")
    if query.distinct_fields:
        raise TypeError(f"queryset is a distinct(*fields), which Django cannot update: {again}")
    grouped, key = query.group_by, queryset.model._meta.pk
    # (True is one group for each row.)
    if isinstance(grouped, tuple) and key not in [getattr(c, "target", None) for c in grouped]:
        raise TypeError(
            "queryset is grouped by values(...), so what it has are no rows: pass "
            "Model.objects.filter(...) with the values that you mean"
        )


def _fence(model: type[Model], fence_field: str) -> Field[Any, Any]:
    field = _column(model, fence_field, "fence_field")
    if field.primary_key or field.get_internal_type() not in (
        "BigIntegerField",
        "PositiveBigIntegerField",
    ):
        what = "the primary key" if field.primary_key else f"a {field.get_internal_type()}"
        raise TypeError(
            f"{model.__name__}.{fence_field} is {what}, which cannot hold a token: give the model "
            "a BigIntegerField(default=0)"
        )
    return field


def _checked(
    model: type[Model], updates: Mapping[str, Any] | None, fence: Field[Any, Any]
) -> dict[str, Any]:
    """The values by field, each once."""
    if updates is not None and not isinstance(updates, Mapping):
        raise TypeError(f"updates is a mapping of fields, not {type(updates).__name__}")
    setting: dict[str, Any] = {}
    for name, value in (updates or {}).items():
        field = _column(model, name, "a key of updates")
        if field == fence:
            raise ValueError(f"updates sets {fence.name}, which the token sets: leave it out")
        if field.name in setting:  # customer and customer_id are one
            raise ValueError(f"updates sets {field.name} twice: which of them is meant?")
        _check_value(field, value)
        setting[field.name] = value
    return setting


def _column(model: type[Model], name: object, what: str) -> Field[Any, Any]:
    """The field of that name, which a statement can set in the model's own table."""
    if not isinstance(name, str):
        raise TypeError(f"{what} is the name of a field, not {type(name).__name__}")
    try:
        field: Any = model._meta.get_field(name)
    except FieldDoesNotExist:
        known = ", ".join(field.name for field in model._meta.concrete_fields)
        raise ValueError(
            f"{what} is {name!r}, which is no field of {model.__name__}; it has {known}"
        ) from None
    if field not in model._meta.concrete_fields:
        raise TypeError(
            f"{what} is {name!r}, a {type(field).__name__}, which is no column of "
            f"{model.__name__}'s table: update what it leads to by itself"
        )
    if getattr(field, "generated", False):  # since Django 5
        raise TypeError(
            f"{what} is {name!r}, which the database computes: set what it is computed from"
        )
    _check_own(model, field)
    return field


def _check_value(field: Any, value: object) -> None:
    """Refuse what Django would pass on to the database, or fail on without a reason."""
    wrong = None
    if isinstance(value, type) and hasattr(value, "resolve_expression"):
        wrong = f"the class {value.__name__}: call it"
    elif isinstance(value, QuerySet) and len(value._fields or ()) != 1:
        wrong = "a queryset of whole rows: pass .values() of one field"
    elif isinstance(value, Model) and field.is_relation:
        model = field.remote_field.model
        if not isinstance(value, model._meta.concrete_model):  # whose key would be taken
            wrong = f"a {type(value).__name__}: it takes a {model.__name__}"
    if wrong is not None:
        raise TypeError(f"updates sets {field.name} to {wrong}")


def _check_own(model: type[Model], field: Any) -> None:
    """Refuse the field of a parent: its table is updated by a statement of its own."""
    owner = field.model._meta.concrete_model
    if owner is not model._meta.concrete_model:
        raise TypeError(
            f"{field.name} is a field of {owner.__name__}, whose table is not {model.__name__}'s: "
            f"one statement cannot update both: update {owner.__name__} by itself"
        )


def _updated(rows: QuerySet[Any], setting: dict[str, Any]) -> bool:
    """Update them; ``ValueError`` for a value or an expression that Django does not write."""
    try:
        return bool(rows.update(**setting))
    except (FieldError, ValidationError) as error:  # before it sends anything
        raise ValueError(f"updates of {rows.model.__name__} cannot be written: {error}") from error


def _rows(queryset: QuerySet[Any], database: str) -> QuerySet[Any]:
    """The same rows, as a queryset whose further filters are conditions on the updated table."""
    queryset = queryset.using(database)
    if _is_plain(queryset):
        return queryset
    vendor = connections[database].vendor
    if vendor == "mysql":
        raise NotImplementedError(
            f"this queryset has joins or aggregates, whose rows Django looks up before it updates "
            f"them on {vendor}: filter by columns of {queryset.model.__name__} alone"
        )
    found = queryset.order_by().values("pk")
    found.query.select_for_update = False  # the update locks what it writes
    # Of the same class, for its update().
    rows = type(queryset)(model=queryset.model, using=database, hints=queryset._hints)
    rows = rows.filter(pk__in=found)
    if not _is_plain(rows):
        raise TypeError(f"every {type(queryset).__name__} has joins: use a plain QuerySet")
    return rows


def _is_plain(queryset: QuerySet[Any]) -> bool:
    """Whether Django writes the conditions into the UPDATE as they are.

    It does with one table; as soon as there is another, all of them go into ``pk IN (SELECT ...)``.
    """
    query = queryset.query
    return (
        query.count_active_tables() <= 1  # what its compiler asks
        and query.group_by is None
        and not (query.distinct or query.extra or query.extra_tables)
        and not any(
            getattr(annotation, "contains_aggregate", False)
            or getattr(annotation, "contains_over_clause", False)
            for annotation in query.annotations.values()
        )
    )


def _key(queryset: QuerySet[Any]) -> dict[str, Any] | None:
    """The primary key that the queryset names, or None: it may mean many rows."""
    key, table = queryset.model._meta.pk, queryset.query.base_table
    if queryset.query.is_empty():  # none()
        return None
    for lookup in _all_of(queryset.query.where):
        column = getattr(lookup, "lhs", None)
        if (
            isinstance(lookup, Exact)
            and isinstance(column, Col)
            and (column.alias, column.target) == (table, key)
            and lookup.rhs_is_direct_value()
        ):
            return {key.attname: lookup.rhs}
    return None


def _all_of(where: WhereNode) -> Iterator[Any]:
    """The conditions that hold for every row."""
    if where.connector == AND and not where.negated:
        for child in where.children:
            if isinstance(child, WhereNode):
                yield from _all_of(child)
            else:
                yield child


def _refusal(
    table: str, key: dict[str, Any] | None, token: FenceToken | int, newest: int
) -> FencedOutError:
    row = f"a row of {table}" if key is None else f"{table} {key!r}"
    return FencedOutError(
        f"token {int(token)} is older than {newest}, which {row} carries: somebody newer has taken "
        "over; roll back and stop",
        resource=token.resource if isinstance(token, FenceToken) else "",
        token=int(token),
        current=newest,
        table=table,
        key=key,
    )
