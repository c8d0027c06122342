"""What a fenced statement writes to: a table, a mapped class or an alias, and its fence column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Table,
    TypeDecorator,
    UniqueConstraint,
    bindparam,
    inspect,
    or_,
)
from sqlalchemy.orm import Mapper, QueryableAttribute
from sqlalchemy.orm.exc import UnmappedColumnError
from sqlalchemy.orm.util import AliasedInsp
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import BinaryExpression, BindParameter, BooleanClauseList
from sqlalchemy.sql.selectable import Alias

FENCE = "fence_token"
"""The name that a fence column has unless another one is given."""

_BOOLEAN = Boolean()


class Target:
    """A table, mapped class or alias, with its fence column.

    Columns are the table's own, found once; `at` is how the statement speaks of one.
    """

    def __init__(self, given: Any, fence: Any = FENCE) -> None:
        self.mapper: Mapper[Any] | None = None
        found: Any = given if isinstance(given, Table) else inspect(given, raiseerr=False)
        if isinstance(found, AliasedInsp):
            self.mapper, self.source = found.mapper, found.selectable
        elif isinstance(found, Mapper):
            self.mapper, self.source = found, found.local_table
        else:
            self.source = found
        table = self.source.element if isinstance(self.source, Alias) else self.source
        if not isinstance(table, Table):
            raise TypeError(
                "a fenced statement writes to a table, a mapped class or an alias of one, "
                f"not {given!r}"
            )
        self.table = table
        self.name = table.fullname
        own = self.column(fence, "fence")
        self.fence = self.at(own)
        self.own = own
        kind = own.type.impl_instance if isinstance(own.type, TypeDecorator) else own.type
        if not isinstance(kind, BigInteger):
            raise TypeError(
                f"{self.name}.{own.name} is {kind!r}, which does not hold or order tokens: make "
                "it a BIGINT (BigInteger)"
            )

    def column(self, given: Any, what: str) -> Column[Any]:
        """The table's column that is meant by a name, a column or a mapped attribute."""
        found: Any
        if isinstance(given, str):
            found = self._named(given)
        elif isinstance(given, QueryableAttribute):
            found = self._mapped(given.property)
        elif isinstance(given, Column):
            found = self.table.c.get(given.key) if given.table is self.source else given
        else:
            raise TypeError(f"{what} is a column or its name, not {type(given).__name__}")
        if not isinstance(found, Column) or found.table is not self.table:
            known = ", ".join(self.table.c.keys())
            raise ValueError(f"table {self.name} has no column {str(given)!r}; it has {known}")
        return found

    def _named(self, name: str) -> Any:
        """The column of an attribute that is called so, or else of the table."""
        if self.mapper is not None and self.mapper.has_property(name):
            return self._mapped(self.mapper.get_property(name))
        return self.table.c.get(name)

    def _mapped(self, attribute: Any) -> Any:
        """The column of a mapped attribute that is in this table: others may be in a parent's."""
        columns = getattr(attribute, "columns", ())
        return next((c for c in columns if getattr(c, "table", None) is self.table), None)

    def at(self, column: Column[Any]) -> Any:
        """The column as the statement's target has it."""
        return column if self.source is self.table else self.source.c[column.key]

    def key_of(self, column: Column[Any]) -> Any:
        """What ``values()`` of an UPDATE calls the column."""
        if self.mapper is None:
            return column
        try:
            return self.mapper.get_property_by_column(column).key
        except UnmappedColumnError:
            name = self.mapper.class_.__name__
            raise ValueError(f"{name} has no attribute for {column}: pass the table") from None

    def bound(self, token: int) -> BindParameter[int]:
        """The token as a parameter, which a statement that sets and compares it sends once."""
        return bindparam(self.own.key, token, self.own.type, unique=True)

    def fresh(self, token: BindParameter[int]) -> ColumnElement[bool]:
        """Whether a row admits a write with this token. NULL is "never fenced", and admits it."""
        # What `fence <= token` returns, in a third of its time: a tenth of building an UPDATE.
        passes = BinaryExpression(self.fence, token, operators.le, type_=_BOOLEAN)
        return or_(self.fence.is_(None), passes) if self.fence.nullable else passes

    def columns(self, given: Any, what: str) -> dict[Column[Any], Any]:
        """A mapping by column, without the fence's own."""
        if not isinstance(given, Mapping):
            raise TypeError(f"{what} is a mapping of columns, not {type(given).__name__}")
        found = {self.column(name, f"a key of {what}"): value for name, value in given.items()}
        if len(found) < len(given):
            raise ValueError(f"{what} names a column twice")
        if self.own in found:
            raise ValueError(f"{what} sets {self.own.name}, which the token sets: leave it out")
        return found

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
        # A mapped attribute is an annotated copy, which hashes like the column itself.
        return own is not None and (own is expression or hash(own) == hash(expression))


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
