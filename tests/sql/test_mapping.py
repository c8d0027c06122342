"""What SQLAlchemy calls a column and what the table calls it; classes that share tables."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    ForeignKey,
    Integer,
    MetaData,
    Table,
    Text,
    create_engine,
    func,
    select,
    true,
)
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, create_async_engine
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    column_property,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from fencekit import FencedOutError, FenceToken
from fencekit.sql import (
    FencedMixin,
    apply_once,
    execute_fenced,
    fence_token,
    fenced_insert,
    fenced_transaction,
    fenced_update,
    fenced_update_many,
    fenced_upsert,
    metadata,
    operation,
)


class Base(DeclarativeBase):
    pass


class Swapped(FencedMixin, Base):
    """Each attribute has the name of the other's column."""

    __tablename__ = "swapped"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str | None] = mapped_column("title")
    title: Mapped[str | None] = mapped_column("name")


class Person(FencedMixin, Base):
    __tablename__ = "people"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    name: Mapped[str | None]
    __mapper_args__: Any = {"polymorphic_on": "kind", "polymorphic_identity": "person"}  # noqa: RUF012


class Manager(Person):
    __mapper_args__: Any = {"polymorphic_identity": "manager"}  # noqa: RUF012


class Engineer(Person):
    """Its rows lie in two tables, and have a fence in each."""

    __tablename__ = "engineers"
    id: Mapped[int] = mapped_column(ForeignKey("people.id"), primary_key=True)
    tool: Mapped[str | None]
    fence: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    __mapper_args__: Any = {"polymorphic_identity": "engineer"}  # noqa: RUF012


class Counted(FencedMixin, Base):
    """Columns that change by themselves."""

    __tablename__ = "counted"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int]
    touched: Mapped[int] = mapped_column(default=0, onupdate=7)


Counted.double = column_property(Counted.value * 2)  # type: ignore[attr-defined]


class Other(FencedMixin, Base):
    __tablename__ = "other"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str | None]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = create_engine("sqlite://")
    for tables in (Base.metadata, metadata):
        tables.create_all(engine)
    yield engine
    engine.dispose()


TABLE: Any = Swapped.__table__


def write(engine: Engine, statement: Any) -> None:
    with engine.begin() as connection:
        execute_fenced(connection, statement)


@pytest.mark.parametrize("build", [fenced_insert, fenced_upsert])
@pytest.mark.parametrize(
    "names",
    [
        (Swapped.name, Swapped.title),
        (TABLE.c.title, TABLE.c.name),
        ("name", "title"),  # an attribute comes before a column
    ],
    ids=["attributes", "columns", "names"],
)
def test_a_value_goes_to_the_column_that_was_meant(engine: Engine, build: Any, names: Any) -> None:
    name, title = names
    write(engine, build(Swapped, 5, values={"id": 1, name: "N", title: "T"}))
    write(engine, fenced_upsert(Swapped, 6, values={"id": 1, name: "N2", title: "T2"}))
    with Session(engine) as session:
        row = session.get(Swapped, 1)
        assert row is not None
        assert (row.name, row.title) == ("N2", "T2")
    write(
        engine, fenced_update(Swapped, 7, where=Swapped.id == 1, values={name: "N3", title: "T3"})
    )
    write(engine, fenced_update_many(Swapped, 8, [{"id": 1, title: "T4"}]))
    with Session(engine) as session:
        row = session.get(Swapped, 1)
        assert row is not None
        assert (row.name, row.title) == ("N3", "T4")
    write(engine, fenced_update(TABLE, 9, where=TABLE.c.id == 1, values={"name": "by table"}))
    with engine.connect() as connection:
        assert connection.execute(select(TABLE.c.name, TABLE.c.title)).one() == ("by table", "N3")


def test_a_column_of_another_table_is_refused() -> None:
    other: Any = Other.__table__
    for target, given in (
        (Swapped, Other.name),
        (TABLE, other.c.name),
        (TABLE, TABLE.alias().c.name),
        (Engineer, Engineer.name),
        (Engineer, "name"),
        (Counted, Counted.double),  # type: ignore[attr-defined]
    ):
        fence = "fence" if target is Engineer else "fence_token"
        with pytest.raises(ValueError, match="has no column"):
            fenced_update(target, 5, where=true(), values={given: "x"}, fence=fence)
    with pytest.raises(ValueError, match="has no column"):
        fenced_update(TABLE, 5, where=true(), values={}, fence=other.c.fence_token)
    with pytest.raises(ValueError, match="has no column"):  # it is the parent's
        fenced_update(Engineer, 5, where=true(), values={})


def test_a_class_that_shares_its_table_is_inserted_as_what_it_is(engine: Engine) -> None:
    write(engine, fenced_insert(Manager, 5, values={"id": 1, "name": "M"}))
    write(engine, fenced_upsert(Manager, 6, values={"id": 1, "name": "M2"}))
    write(engine, fenced_insert(Person, 5, values=[{"id": n, "name": "P"} for n in (2, 3)]))
    with Session(engine) as session:
        found = session.scalars(select(Person).order_by(Person.id)).all()
        assert [type(one) for one in found] == [Manager, Person, Person]
        assert found[0].name == "M2"


def test_an_object_knows_what_was_set_and_after_a_refresh_the_rest(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        session.add(Counted(id=1, value=1))
    with Session(engine) as session, session.begin():
        one: Any = session.get(Counted, 1)
        values = {Counted.value: 4}
        execute_fenced(session, fenced_update(Counted, 5, where=Counted.id == 1, values=values))
        assert (one.value, one.fence_token) == (4, 5)
        session.refresh(one)
        assert (one.touched, one.double) == (7, 8)


@pytest.mark.parametrize("kind", [Text(), Integer()])
def test_a_fence_that_does_not_order_tokens_is_refused(kind: Any) -> None:
    table = Table("wrong", MetaData(), Column("id", Integer), Column("fence_token", kind))
    with pytest.raises(TypeError, match="BIGINT"):
        fenced_update(table, 5, where=table.c.id == 1, values={})


def test_the_key_of_another_alias_is_not_this_ones(engine: Engine) -> None:
    write(engine, fenced_insert(Other, 5, values={"id": 1}))
    write(engine, fenced_insert(Other, 99, values={"id": 2}))
    one, another = Other.__table__.alias(), Other.__table__.alias()
    there = select(another.c.id).where(another.c.id == 1).exists()
    with pytest.raises(FencedOutError):
        write(engine, fenced_update(one, 6, where=there & (one.c.id > 0), values={"name": "x"}))
    plain = Table("plain", MetaData(), Column("id", Integer, primary_key=True), fence_token())
    facts: Any = fenced_update(one, 6, where=one.c.id == another.c.id, values={})
    assert facts.fenced.target.pinned(another.c.id == 1) is None
    assert plain.alias().c.id is not plain.alias().c.id


def test_expressions_are_set_for_each_row(engine: Engine) -> None:
    write(engine, fenced_insert(Other, 5, values=[{"id": 1}, {"id": 2}]))
    rows = [{"id": 1, "name": func.upper("a")}, {"id": 2, "name": "b"}]
    write(engine, fenced_update_many(Other, 6, rows))
    with engine.connect() as connection:
        assert connection.scalars(select(Other.name).order_by(Other.id)).all() == ["A", "b"]


def test_nothing_is_left_at_the_callers_tables(engine: Engine) -> None:
    fenced_update(Swapped, 5, where=Swapped.id == 1, values={})
    assert TABLE.info == {}
    assert pickle.loads(pickle.dumps(Base.metadata)).tables.keys() == Base.metadata.tables.keys()


def test_a_scoped_session_is_one(engine: Engine) -> None:
    sessions = scoped_session(sessionmaker(engine))
    with fenced_transaction(sessions, FenceToken(5, "a")), operation(sessions, "x") as op:
        assert op.first
        execute_fenced(sessions, fenced_insert(Other, 5, values={"id": 1}))
    assert not apply_once(sessions, "x").first
    sessions.remove()
    with engine.connect() as connection:
        assert connection.scalars(select(Other.id)).all() == [1]


@pytest.mark.asyncio
async def test_an_asyncio_scoped_session_is_one(tmp_path: Any) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'test.db'}")
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)

    def make() -> AsyncSession:
        return AsyncSession(engine)

    sessions: Any = async_scoped_session(make, scopefunc=lambda: 1)  # type: ignore[arg-type]
    async with fenced_transaction(sessions, FenceToken(5, "a")), operation(sessions, "x") as op:
        assert op.first
    assert not (await apply_once(sessions, "x")).first
    await sessions.remove()
    await engine.dispose()
