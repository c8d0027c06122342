"""What a fenced statement writes to: a table, a mapped class or an alias, and its fence column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Table,
    UniqueConstraint,
    inspect,
    or_,
)
from sqlalchemy.exc import NoInspectionAvailable
from sqlalchemy.orm import Mapper
from sqlalchemy.orm.util import AliasedInsp
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import BinaryExpression, BindParameter, BooleanClauseList
from sqlalchemy.sql.selectable import Alias

FENCE = "fence_token"
"""The name that a fence column has unless another one is given."""


class Target:
    """A table, mapped class or alias, with its fence column."""

    def __init__(self, given: Any, fence: Any = FENCE) -> None:
        self.mapper: Mapper[Any] | None = None
        try:
            found: Any = inspect(given)
        except NoInspectionAvailable:
            raise _no_target(given) from None
        if isinstance(found, AliasedInsp):
            self.mapper, self.source = found.mapper, found.selectable
        elif isinstance(found, Mapper):
            self.mapper, self.source = found, found.local_table
        else:
            self.source = found
        table = self.source.element if isinstance(self.source, Alias) else self.source
        if not isinstance(table, Table):
            raise _no_target(given)
        self.table = table
        self.name = table.fullname
        self.fence = self.column(fence, "fence")
        kind = self.fence.type
        if isinstance(kind, Integer) and not isinstance(kind, BigInteger):
            raise TypeError(
                f"{self.name}.{self.fence.name} is {kind!r}, too small for a token: make it "
                "a BIGINT (BigInteger)"
            )

    def column(self, given: Any, what: str) -> Any:
        """The column of this target's table that is called so, as a name, column or attribute."""
        name = given if isinstance(given, str) else getattr(given, "key", None)
        if not isinstance(name, str):
            raise TypeError(f"{what} is a column or its name, not {type(given).__name__}")
        if self.mapper is not None and name in self.mapper.columns:
            name = self.mapper.columns[name].key
        try:
            return self.source.c[name]
        except KeyError:
            raise ValueError(
                f"table {self.name} has no column {name!r}; it has {', '.join(self.table.c.keys())}"
            ) from None

    def key_of(self, column: Any) -> Any:
        """What ``values()`` of a statement on this target calls the column."""
        if self.mapper is None:
            return self._plain(column)
        return self.mapper.get_property_by_column(self.table.c[column.key]).key

    def _plain(self, column: Any) -> Any:
        return self.table.c[column.key]

    def fresh(self, token: int) -> ColumnElement[bool]:
        """Whether a row admits a write with this token. NULL is "never fenced", and admits it."""
        passes: ColumnElement[bool] = self.fence <= token
        return or_(self.fence.is_(None), passes) if self.fence.nullable else passes

    def values(self, given: Any, token: int, *, plain: bool = False) -> dict[Any, Any]:
        """The values by what the target calls the columns, or by column; with the fence's."""
        if not isinstance(given, Mapping):
            raise TypeError(f"values is a mapping of columns, not {type(given).__name__}")
        called: Callable[[Any], Any] = self._plain if plain else self.key_of
        found = {called(self.column(name, "a key of values")): v for name, v in given.items()}
        if len(found) < len(given):
            raise ValueError("values names a column twice")
        own = called(self.fence)
        if own in found:
            raise ValueError(f"values sets {self.fence.name}, which the token sets: leave it out")
        return {**found, own: token}

    def pinned(self, where: ColumnElement[bool]) -> dict[str, Any] | None:
        """The values of a unique key that the condition names, or None: it may mean many rows."""
        fixed = dict(self._fixed(where))
        for names in self._unique_keys():
            if names and names <= fixed.keys():
                return {name: fixed[name] for name in sorted(names)}
        return None

    def _unique_keys(self) -> Iterator[set[str]]:
        yield {column.key for column in self.table.primary_key}
        for constraint in self.table.constraints:
            if isinstance(constraint, UniqueConstraint):
                yield {column.key for column in constraint}

    def _fixed(self, where: ColumnElement[bool]) -> Iterator[tuple[str, Any]]:
        if isinstance(where, BooleanClauseList) and where.operator is operators.and_:
            for part in where.clauses:
                yield from self._fixed(part)
        if not isinstance(where, BinaryExpression) or where.operator is not operators.eq:
            return
        for one, other in ((where.left, where.right), (where.right, where.left)):
            name = getattr(one, "key", None)
            if isinstance(other, BindParameter) and self._is_own(one, name):
                yield str(name), other.effective_value

    def _is_own(self, expression: Any, name: Any) -> bool:
        own = self.source.c.get(name)
        return own is not None and (own is expression or bool(own.compare(expression)))


def target_of(given: Any, fence: Any = FENCE) -> Target:
    """The target, remembered at its table, where SQLAlchemy has a place for such things."""
    found: Any = given if isinstance(given, Table) else inspect(given, raiseerr=False)
    table = found.local_table if isinstance(found, Mapper) else found
    if not isinstance(table, Table) or not isinstance(fence, str):
        return Target(given, fence)
    key = ("fencekit", found, fence)  # a copied table comes with what was remembered
    known = table.info.get(key)
    if known is None:
        known = table.info[key] = Target(given, fence)
    return cast(Target, known)


def check_where(where: object) -> ColumnElement[bool]:
    """The condition, or TypeError for one that Python has already decided."""
    if where is None or isinstance(where, (bool, str)):
        raise TypeError(
            f"where is a condition on the table's columns, not {where!r}: a comparison of plain "
            "values is decided by Python; for all rows pass sqlalchemy.true()"
        )
    if not hasattr(where, "__clause_element__") and not isinstance(where, visitors.Visitable):
        raise TypeError(f"where is a condition on the table's columns, not {where!r}")
    return where  # type: ignore[return-value]


def _no_target(given: object) -> TypeError:
    return TypeError(
        f"a fenced statement writes to a table, a mapped class or an alias of one, not {given!r}"
    )
