"""What a fenced statement writes to: a table, a mapped class or an alias, and its fence column."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    ClauseElement,
    Column,
    ColumnElement,
    False_,
    Null,
    Table,
    TextClause,
    True_,
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
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.elements import BinaryExpression, BindParameter, BooleanClauseList
from sqlalchemy.sql.selectable import Alias, GenerativeSelect
from sqlalchemy.types import NullType

FENCE = "fence_token"
"""The name that a fence column has unless another one is given."""

_BOOLEAN = Boolean()


class Target:
    """A table, mapped class or alias (``given``), with its fence column.

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
        self.given = given
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
            found = self.column_of(given.property)
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
        attribute = None if self.mapper is None else getattr(self.mapper.class_, name, None)
        if isinstance(attribute, QueryableAttribute):
            return self.column_of(attribute.property)
        return self.table.c.get(name)

    def column_of(self, attribute: Any) -> Any:
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
        for value in found.values():
            if isinstance(value, ClauseElement) and any(map(_writes, visitors.iterate(value))):
                raise TypeError(f"{what} has a subquery that writes, which no fence would hold up")
        if self.own in found:
            raise ValueError(f"{what} sets {self.own.name}, which the token sets: leave it out")
        return found

    def own_rows(self) -> Iterator[ColumnElement[bool]]:
        """What tells a subclass from others of its table: an INSERT knows the table alone."""
        mapper = self.mapper
        kind = None if mapper is None else mapper.polymorphic_on
        if mapper is None or mapper.inherits is None or not isinstance(kind, Column):
            return
        if kind.table is self.table:
            kinds = [one.polymorphic_identity for one in mapper.self_and_descendants]
            yield kind.in_([one for one in kinds if one is not None])

    def condition(self, given: Any) -> ColumnElement[bool]:
        """The condition, or an error for one that cannot mean rows of this table.

        A condition is looked at twice, by the write and to tell what was refused: what chooses
        other rows the second time is refused too.
        """
        if self._compares(given):
            return given  # type: ignore[no-any-return]
        if given is None or isinstance(given, (bool, str, BindParameter)):
            raise TypeError(
                f"where is a condition on the table's columns, not {given!r}: a comparison of "
                "plain values is decided by Python; for all rows pass sqlalchemy.true()"
            )
        where: Any = given.__clause_element__() if hasattr(given, "__clause_element__") else given
        known = isinstance(where, (True_, False_, TextClause))
        if not known and (not isinstance(where, ColumnElement) or not _is_boolean(where)):
            raise TypeError(f"where is a condition on the table's columns, not {given!r}")
        mentioned = known
        for part in visitors.iterate(where):
            mentioned = mentioned or self._mentions(part)
            if _chooses(part):
                raise ValueError(
                    "where has a subquery with LIMIT or FOR UPDATE, or one that writes, which "
                    "would not choose the same rows twice: select the keys first, then name them"
                )
        if not mentioned:
            raise ValueError(
                f"where does not mention {self.name}, so it means all of its rows or none: name "
                "its columns (an alias has columns of its own), or pass sqlalchemy.true()"
            )
        return where  # type: ignore[no-any-return]

    def _compares(self, where: Any) -> bool:
        """Whether it is one of the table's columns beside a plain value, as most conditions are."""
        return (
            isinstance(where, BinaryExpression)
            and where.operator is operators.eq
            and isinstance(where.right, BindParameter)
            and self._is_own(where.left, getattr(where.left, "key", None))
        )

    def _mentions(self, part: Any) -> bool:
        table = getattr(part, "table", None)
        # Annotated copies, of which mapped attributes are made, hash like what they copy.
        own = table is not None and hash(table) == hash(self.source)
        return own or isinstance(part, TextClause) or getattr(part, "is_literal", False) is True

    def pinned(self, where: ColumnElement[bool]) -> dict[str, Any] | None:
        """The values of a unique key that the condition names, or None: it may mean many rows."""
        fixed: dict[str, Any] = {}
        for name, value in self._fixed(where):
            if fixed.setdefault(name, value) != value:
                return None  # two values at once: it means no row
        for names in self._unique_keys():
            if names and names <= fixed.keys():
                return {name: fixed[name] for name in sorted(names)}
        return None

    def is_unique(self, columns: Collection[Column[Any]]) -> bool:
        """Whether no two rows can have the same values in them, by what the table declares."""
        names = {column.key for column in columns}
        return any(key and key <= names for key in self._unique_keys())

    def _unique_keys(self) -> Iterator[set[str]]:
        yield {column.key for column in self.table.primary_key}
        for constraint in self.table.constraints:
            if isinstance(constraint, UniqueConstraint):
                yield {column.key for column in constraint}
        for index in self.table.indexes:
            whole = all(isinstance(one, Column) for one in index.expressions)
            if index.unique and whole and not index.dialect_kwargs:
                yield {column.key for column in index.columns}

    def _fixed(self, where: ColumnElement[bool]) -> Iterator[tuple[str, Any]]:
        if isinstance(where, BooleanClauseList) and where.operator is operators.and_:
            for part in where.clauses:
                yield from self._fixed(part)
        if not isinstance(where, BinaryExpression) or where.operator is not operators.eq:
            return
        for one, other in ((where.left, where.right), (where.right, where.left)):
            name = getattr(one, "key", None)
            known = isinstance(other, BindParameter) and other.effective_value is not None
            if known and self._is_own(one, name):  # (nothing equals NULL)
                yield str(name), other.effective_value

    def _is_own(self, expression: Any, name: Any) -> bool:
        own = self.source.c.get(name)
        # A mapped attribute is an annotated copy, which hashes like the column itself.
        return own is not None and (own is expression or hash(own) == hash(expression))


def _is_boolean(expression: ColumnElement[Any]) -> bool:
    if isinstance(expression, (BindParameter, Null)) or getattr(expression, "modifier", None):
        return False  # (a modifier is one of ORDER BY)
    if isinstance(getattr(expression, "operator", None), operators.custom_op):
        return True  # of `.op()`, whose type is that of its left side
    kind: Any = expression.type
    if isinstance(kind, TypeDecorator):
        kind = kind.impl_instance
    return isinstance(kind, (Boolean, NullType))  # of a function, SQLAlchemy may not know


def _writes(part: Any) -> bool:
    return isinstance(part, UpdateBase)


def _chooses(part: Any) -> bool:
    """Whether it is a subquery that may find other rows the second time."""
    if _writes(part):
        return True
    if not isinstance(part, GenerativeSelect):
        return False
    limits = (part._limit_clause, part._offset_clause, part._fetch_clause, part._for_update_arg)
    return any(limit is not None for limit in limits)
