"""What `test_django.py` runs: ``python -m tests.sql.django_cases URL``. Prints what it ran."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from tests.sql.django_site import Router, setup

setup(sys.argv[1])

import pytest  # noqa: E402
from asgiref.sync import sync_to_async  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import DatabaseError, connection, connections, models, transaction  # noqa: E402
from django.utils import timezone  # noqa: E402

import fencekit  # noqa: E402
from fencekit import FencedOutError, FenceToken, IdempotencyConflict  # noqa: E402
from fencekit.django import (  # noqa: E402
    afenced_update,
    apply_once,
    fenced_transaction,
    fenced_update,
    operation,
    purge_fences,
    purge_operations,
)
from fencekit.django.models import Fence, Operation  # noqa: E402
from tests.sql.django_app.models import (  # noqa: E402
    Customer,
    Item,
    Old,
    Order,
    ProxyTag,
    Rush,
    Shelf,
    Tag,
)


def token(value: int, resource: str = "a") -> FenceToken:
    return FenceToken(value, resource)


def case_a_queryset_is_updated_unless_it_is_newer() -> None:
    # scenario 82
    Order.objects.create(pk=1)
    rows = Order.objects.filter(pk=1)
    assert fenced_update(rows, token(5), {"status": "a"})
    assert fenced_update(rows, 6, {"status": "b", "tries": models.F("tries") + 1})
    assert not fenced_update(rows, 5, {"status": "stale"})
    with pytest.raises(FencedOutError) as refused:
        fenced_update(rows, token(5), {"status": "stale"}, raise_on_stale=True)
    assert (refused.value.token, refused.value.current, refused.value.resource) == (5, 6, "a")
    nothing = Order.objects.filter(pk=9)
    assert not fenced_update(nothing, 5, {"status": "x"}, raise_on_stale=True)
    assert list(rows.values_list("status", "tries", "fence_token")) == [("b", 1, 6)]
    assert fencekit.fenced_update(rows, 7, {"status": "c"})
    assert fencekit.fenced_update(Order.objects.order_by("-pk"), 7)


def case_one_refused_row_among_many_is_told() -> None:
    Order.objects.bulk_create(Order(fence_token=8 * (n == 2)) for n in range(4))
    everything = Order.objects.order_by("pk")
    with pytest.raises(FencedOutError), transaction.atomic():
        fenced_update(everything, 7, {"status": "x"}, raise_on_stale=True)
    assert not Order.objects.filter(status="x").exists()


def case_null_is_never_fenced() -> None:
    # scenario 83
    Old.objects.create(pk=1)
    rows = Old.objects.filter(pk=1)
    assert fenced_update(rows, 5, {"status": "a"}, fence_field="fence")
    assert fenced_update(rows, 6, {"status": "parked"}, fence_field="fence")
    assert not fenced_update(rows, 5, {"status": "stale"}, fence_field="fence")


def case_an_update_is_one_statement() -> None:
    with connection.execute_wrapper(counted := Counter()):
        fenced_update(Order.objects.filter(pk=1), 5, {"status": "a"})
    assert counted.number == 1


class Counter:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self, execute: Any, sql: Any, *rest: Any) -> Any:
        self.number += 1
        return execute(sql, *rest)


def case_what_cannot_be_meant_is_refused() -> None:
    rows: Any = Order.objects.filter(pk=1)
    with connection.execute_wrapper(counted := Counter()):
        for wrong in (None, "5", 5.0, True):
            with pytest.raises(TypeError, match="token"):
                fenced_update(rows, wrong)
        with pytest.raises(TypeError, match="queryset"):
            fenced_update(Order, 5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="updates"):
            fenced_update(rows, 5, [("status", "x")])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="leave it out"):
            fenced_update(rows, 5, {"fence_token": 7})
        with pytest.raises(TypeError, match="BigIntegerField"):
            fenced_update(Old.objects.all(), 5, fence_field="small")
        with pytest.raises(ValueError, match="atomic"):
            apply_once("a")
        with pytest.raises(TypeError, match="fingerprint"):
            apply_once("a", fingerprint=7)  # type: ignore[arg-type]
        for broken in ("a\0b", "\ud800"):
            with pytest.raises(ValueError, match="fingerprint"):
                apply_once("a", fingerprint=broken)
            with pytest.raises(ValueError, match="fingerprint"):
                with_a_block(fingerprint=broken)
        with pytest.raises(ValueError, match="text"):
            apply_once("a", result=1, codec=Raw())
    assert counted.number == 0


def case_fields_and_values_that_cannot_be_written_are_refused() -> None:
    shelves, orders = Shelf.objects.filter(pk=1), Order.objects.filter(pk=1)
    stranger = Order(pk=1)
    rank = models.Window(models.functions.RowNumber(), order_by="pk")
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (orders, {"nope": 1}, ValueError, "'nope'.*it has id, customer, status"),
        (orders, {"pk": 1}, ValueError, "'pk'"),
        (orders, {5: 1}, TypeError, "int"),
        (orders, {None: 1}, TypeError, "NoneType"),
        (orders, {"customer__name": "x"}, ValueError, "customer__name"),
        (orders, {"item": 1}, TypeError, "ManyToOneRel"),
        (orders, {"rush": 1}, TypeError, "OneToOneRel"),
        (shelves, {"owners": 1}, TypeError, "ManyToManyField"),
        (shelves, {"label": "x"}, ValueError, "'label'"),
        (shelves, {"made": "some day"}, ValueError, "some day"),
        (shelves, {"tries": "many"}, ValueError, "many"),
        (shelves, {"tries": []}, TypeError, "tries"),
        (orders, {"customer": None, "customer_id": 1}, ValueError, "customer twice"),
        (orders, {"customer": stranger}, TypeError, "Order: it takes a Customer"),
        (orders, {"customer": Customer()}, ValueError, "Customer"),
        (orders, {"status": stranger}, TypeError, "status"),
        (orders, {"status": models.F("customer__name")}, ValueError, "Joined"),
        (orders, {"status": models.F("nope")}, ValueError, "nope"),
        (orders, {"tries": models.Count("pk")}, ValueError, "Aggregate"),
        (orders, {"tries": rank}, ValueError, "Window"),
        (orders, {"tries": models.F}, TypeError, "the class F"),
        (orders, {"tries": orders}, TypeError, "whole rows"),
        (orders, {"tries": orders.values("pk", "tries")}, TypeError, "whole rows"),
    ]
    if hasattr(models, "GeneratedField"):
        cases.append((shelves, {"doubled": 1}, TypeError, "computes"))
    with connection.execute_wrapper(counted := Counter()):
        for rows, updates, error, said in cases:
            with pytest.raises(error, match=said):
                fenced_update(rows, 5, updates)
    assert counted.number == 0
    for rows, updates, error, said in cases:
        with pytest.raises(error, match=said), transaction.atomic():
            fenced_update(rows, 5, updates, raise_on_stale=True)
    one = Customer.objects.create(name="bob")
    Order.objects.create(pk=1)
    assert fenced_update(orders, 5, {"customer": one, "tries": orders.values("pk")})
    assert fenced_update(orders, 5, {"customer_id": one.pk})
    assert list(orders.values_list("customer", "tries")) == [(one.pk, 1)]


def case_a_fence_field_that_cannot_be_meant_is_refused() -> None:
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (Order, "nope", ValueError, "fence_field is 'nope'"),
        (Order, None, TypeError, "fence_field"),
        (Order, 5, TypeError, "fence_field"),
        (Order, "id", TypeError, "primary key"),
        (Order, "customer", TypeError, "ForeignKey"),
        (Order, "item", TypeError, "ManyToOneRel"),
        (Item, "order__fence_token", ValueError, "order__fence_token"),
        (Shelf, "owners", TypeError, "ManyToManyField"),
        (Shelf, "label", ValueError, "'label'"),
    ]
    if hasattr(models, "GeneratedField"):
        wrong.append((Shelf, "doubled", TypeError, "computes"))
    with connection.execute_wrapper(counted := Counter()):
        for model, name, error, said in wrong:
            with pytest.raises(error, match=said):
                fenced_update(model.objects.all(), 5, fence_field=name)
        for loud in ("no", 1, None):
            with pytest.raises(TypeError, match="raise_on_stale"):
                fenced_update(Order.objects.all(), 5, raise_on_stale=loud)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="default, replica"):
            fenced_update(Order.objects.using("nope"), 5)
    assert counted.number == 0


def case_a_purge_that_cannot_be_meant_is_refused() -> None:
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (30, {}, TypeError, "older_than"),
        (None, {}, TypeError, "older_than"),
        (timedelta(-1), {}, ValueError, "older_than"),
        (timedelta(days=36526), {}, ValueError, "100 years"),
        (timedelta.max, {}, ValueError, "100 years"),
        (timedelta(1), {"batch": 0}, ValueError, "batch"),
        (timedelta(1), {"batch": 10_001}, ValueError, "10000"),
        (timedelta(1), {"batch": 10**20}, ValueError, "10000"),
        (timedelta(1), {"batch": "5"}, TypeError, "batch"),
        (timedelta(1), {"batch": True}, TypeError, "batch"),
        (timedelta(1), {"using": None}, TypeError, "using"),
        (timedelta(1), {"using": "nope"}, ValueError, "default, replica"),
    ]
    with connection.execute_wrapper(counted := Counter()):
        for purge, (age, options, error, said) in itertools.product(
            (purge_operations, purge_fences), wrong
        ):
            with pytest.raises(error, match=said):
                purge(age, **options)
    assert counted.number == 0
    assert purge_operations(timedelta(days=36525), batch=10_000) == 0


def with_a_block(**options: Any) -> None:
    with operation("a", **options) as block:
        block.result = 1


class Raw:
    """A codec whose bytes are no text."""

    def encode(self, value: Any) -> bytes:
        return b"\xff\xfe"

    def decode(self, data: bytes) -> Any:
        return data


def case_a_result_that_is_no_text_leaves_nothing() -> None:
    with pytest.raises(ValueError, match="text"):
        with_a_block(codec=Raw())
    assert not Operation.objects.exists()


def case_what_has_querysets_is_no_queryset() -> None:
    given: list[Any] = [Order.objects, Order._base_manager, Order]
    for wrong in given:
        for update in (fenced_update, fencekit.fenced_update):
            with pytest.raises(TypeError, match=r"pass \.filter"):
                update(wrong, 5, {"status": "x"})


def case_what_django_cannot_update_is_refused() -> None:
    orders = Order.objects.order_by("pk")
    wrong = [orders[:1], orders.union(orders), orders.distinct("status")]
    groups = orders.order_by().values("status").annotate(n=models.Count("pk"))
    with connection.execute_wrapper(counted := Counter()):
        for rows in wrong:
            for stale in (False, True):
                with pytest.raises(TypeError, match="pk__in"):
                    fenced_update(rows, 5, {"status": "x"}, raise_on_stale=stale)
        with pytest.raises(TypeError, match="grouped"):
            fenced_update(groups.filter(n__gt=1), 5, {"status": "x"})
    assert counted.number == 0


def case_fields_of_two_tables_are_refused() -> None:
    Rush.objects.create(pk=1, fence_token=5)
    rush = Rush.objects.filter(pk=1)
    with connection.execute_wrapper(counted := Counter()):
        with pytest.raises(TypeError, match="update Order"):
            fenced_update(rush, 6, {"courier": "x"})
        with pytest.raises(TypeError, match="update Order"):
            fenced_update(rush, 6, {"status": "x"}, fence_field="rush_fence")
    assert counted.number == 0
    of_parent = rush.filter(status="new")
    assert fenced_update(of_parent, 6, {"courier": "a"}, fence_field="rush_fence")
    assert not fenced_update(of_parent, 5, {"courier": "b"}, fence_field="rush_fence")
    assert fenced_update(Order.objects.filter(rush__courier="a"), 6, {"status": "done"})
    assert list(rush.values_list("courier", "status")) == [("a", "done")]
    Tag.objects.create(pk=1)
    assert fenced_update(ProxyTag.objects.filter(pk=1), 5, {"name": "a"})


def case_joined_rows_are_refused_on_mysql() -> None:
    wrapper: Any = type(connections["default"])
    with pytest.MonkeyPatch.context() as patch, connection.execute_wrapper(counted := Counter()):
        patch.setattr(wrapper, "vendor", "mysql")
        with pytest.raises(NotImplementedError, match="joins"):
            fenced_update(Order.objects.filter(customer__name="bob"), 5, {"status": "x"})
        assert counted.number == 0
        assert not fenced_update(Order.objects.filter(pk=1), 5, {"status": "x"})


def querysets() -> dict[str, models.QuerySet[Any]]:
    """Querysets that all have the order 1 alone, by what is special about them."""
    orders = Order.objects.all()
    named = orders.filter(customer__name="bob")
    tries = orders.alias(next=models.F("tries") + 1).annotate(whole=models.F("next") * 2)
    ranked = orders.annotate(rank=models.Window(models.functions.RowNumber(), order_by="pk"))
    items = Item.objects.filter(order=models.OuterRef("pk"))
    return {
        "plain": orders.filter(pk=1),
        "either": orders.filter(models.Q(pk=1) | models.Q(status="never")),
        "relation": named,
        "many to one": orders.filter(item__isnull=False),
        "exclude": orders.exclude(customer__name="al").exclude(customer=None),
        "exclude many": orders.exclude(pk=2).exclude(item__pk=0),
        "order_by": orders.filter(pk=1).order_by("customer__name"),
        "order_by and filter": named.order_by("customer__name", "-pk"),
        "annotate": tries.filter(pk=1, whole=2),
        "annotate relation": orders.annotate(n=models.Count("item")).filter(n__gt=0),
        "aggregate": orders.annotate(n=models.Count("pk")).filter(pk=1, n=1),
        "values of an aggregate": orders.annotate(n=models.Count("item")).filter(n=2).values("n"),
        "aggregate by key": orders.values("pk").annotate(n=models.Count("item")).filter(n=2),
        "order_by aggregate": orders.annotate(n=models.Count("item")).filter(n=2).order_by("n"),
        "window": ranked.filter(rank=1),
        "subquery": orders.filter(pk__in=named.values("pk")),
        "slice in a subquery": orders.filter(pk__in=orders.order_by("pk")[:1]),
        "exists": orders.filter(models.Exists(items)),
        "distinct": named.distinct(),
        "distinct and filter": orders.filter(pk=1).distinct(),
        "select_related": orders.select_related("customer").filter(pk=1),
        "select_for_update": named.select_for_update(),
        "either queryset": named | orders.filter(pk=1),
        "extra": orders.extra(where=["tries = 0"]).filter(pk=1),
        "extra tables": orders.extra(
            tables=["django_app_customer"],
            where=["django_app_customer.id = django_app_order.customer_id"],
        ),
        "values": orders.filter(pk=1).values("status"),
        "only": named.only("status").defer("status"),
    }


def an_order(fence_token: int = 0) -> None:
    for model in (Item, Order, Customer):
        model.objects.all().delete()
    bob = Customer.objects.create(name="bob")
    order = Order.objects.create(pk=1, customer=bob, fence_token=fence_token)
    Item.objects.bulk_create([Item(order=order), Item(order=order)])
    Order.objects.create(pk=2)


def case_every_queryset_is_updated_by_one_statement() -> None:
    for name, rows in querysets().items():
        an_order()
        with connection.execute_wrapper(counted := Counter()):
            assert fenced_update(rows.all(), 5, {"status": "new"}), name
        assert counted.number == 1, name
        assert not fenced_update(rows.all(), 4, {"status": "stale"}), name
        with pytest.raises(FencedOutError):
            fenced_update(rows.all(), 4, {"status": "stale"}, raise_on_stale=True)
        written = list(Order.objects.order_by("pk").values_list("status", "fence_token"))
        assert written == [("new", 5), ("new", 0)], name
    tries = querysets()["annotate"]
    assert fenced_update(tries, 5, {"tries": models.F("whole")})
    assert Order.objects.get(pk=1).tries == 2


def case_a_stale_update_that_waited_is_refused() -> None:
    # S1, for Django: the check is one of the updated row, not of what was there at the beginning
    if connection.vendor != "postgresql":  # there is one writer at a time
        return
    for (name, rows), loud in itertools.product(querysets().items(), (False, True)):
        an_order()

        def stale(rows: models.QuerySet[Any] = rows, loud: bool = loud) -> bool:
            return fenced_update(rows.all(), 5, {"status": "stale"}, raise_on_stale=loud)

        with racing(stale) as seen:
            Order.objects.filter(pk=1).update(fence_token=6)
        if loud:
            assert (type(seen[0]), seen[0].current) == (FencedOutError, 6), name
        else:
            assert seen == [False], name
        assert list(Order.objects.values_list("status", flat=True)) == ["new", "new"], name


def case_a_stale_update_of_a_child_that_waited_is_refused() -> None:
    if connection.vendor != "postgresql":
        return
    rush = Rush.objects.create(pk=1)
    rows = Rush.objects.filter(status="new")

    def stale() -> bool:
        return fenced_update(rows, 5, {"courier": "stale"}, fence_field="rush_fence")

    with racing(stale) as seen:
        assert fenced_update(rows.all(), 6, {"courier": "new"}, fence_field="rush_fence")
    rush.refresh_from_db()
    assert (seen, rush.courier) == ([False], "new")


@contextmanager
def racing(stale: Callable[[], Any]) -> Iterator[list[Any]]:
    """Commit the body when `stale`, begun after it in a thread, waits for it; give its outcome."""
    seen: list[Any] = []

    def run() -> None:
        try:
            seen.append(stale())
        except Exception as error:
            seen.append(error)
        finally:
            connections.close_all()

    other = threading.Thread(target=run)
    with transaction.atomic():
        yield seen
        other.start()
        wait_for_a_waiter()
        assert seen == []
    other.join(20)
    assert len(seen) == 1


def wait_for_a_waiter() -> None:
    end = time.monotonic() + 20
    with connections["default"].cursor() as cursor:
        number = 0
        while not number:
            assert time.monotonic() < end, "nobody waits"
            cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
            (number,) = cursor.fetchone()


def case_a_refusal_undoes_what_was_written() -> None:
    Order.objects.bulk_create(Order(fence_token=8 * (n == 2)) for n in range(4))
    with pytest.raises(FencedOutError):
        fenced_update(Order.objects.all(), 7, {"status": "x"}, raise_on_stale=True)
    with transaction.atomic():  # which goes on
        with pytest.raises(FencedOutError):
            fenced_update(Order.objects.all(), 7, {"status": "x"}, raise_on_stale=True)
        assert fenced_update(Order.objects.filter(status="new"), 9, {"tries": 1})
    assert set(Order.objects.values_list("status", "tries")) == {("new", 1)}


def case_a_refusal_tells_the_row_that_the_queryset_names() -> None:
    an_order(fence_token=6)
    bob = Customer.objects.get()
    orders = Order.objects.all()
    cases: list[tuple[Any, dict[str, Any] | None]] = [
        (orders.filter(pk=1), {"id": 1}),
        (orders.filter(id="1"), {"id": 1}),
        (orders.filter(models.Q(status="new") & models.Q(pk=1)), {"id": 1}),
        (orders.filter(pk=1).filter(status="new").exclude(tries=7), {"id": 1}),
        (orders.filter(pk=1, customer__name="bob"), {"id": 1}),
        (orders.filter(customer__name="bob"), None),
        (orders.filter(customer=bob), None),
        (orders.filter(models.Q(pk=1) | models.Q(tries=7)), None),
        (orders.exclude(pk=2), None),
        (orders.filter(pk=models.F("tries") + 1), None),
        (orders.filter(item__pk=Item.objects.order_by("pk")[0].pk), None),
        (orders, None),
    ]
    for rows, key in cases:
        with pytest.raises(FencedOutError) as refused:
            fenced_update(rows, token(5), {"status": "stale"}, raise_on_stale=True)
        assert (refused.value.key, refused.value.table) == (key, "django_app_order"), rows.query
        assert (repr(key) if key else "a row of") in str(refused.value)
    Rush.objects.create(pk=9, rush_fence=6)
    with pytest.raises(FencedOutError) as refused:
        fenced_update(Rush.objects.filter(pk=9), 5, fence_field="rush_fence", raise_on_stale=True)
    assert refused.value.key == {"order_ptr_id": 9}


def case_a_named_row_that_a_newer_holder_moved_away_is_stale_and_not_missing() -> None:
    Order.objects.create(pk=1, status="shipped", fence_token=6)
    rows = Order.objects.filter(pk=1, status="new")
    with pytest.raises(FencedOutError):
        fenced_update(rows, 5, {"status": "packed"}, raise_on_stale=True)
    assert not fenced_update(rows, 6, {"status": "packed"}, raise_on_stale=True)
    assert not fenced_update(rows.none(), 5, {"status": "packed"}, raise_on_stale=True)


def case_what_the_queryset_has_read_is_read_again() -> None:
    Order.objects.create(pk=1)
    rows = Order.objects.filter(pk=1)
    assert [order.status for order in rows] == ["new"]
    assert fenced_update(rows, 5, {"status": "a"})
    assert [order.status for order in rows] == ["a"]


def case_a_replica_is_not_asked() -> None:
    Order.objects.using("replica").create(pk=1)
    Order.objects.create(pk=1, fence_token=6)
    Router.reads = "replica"
    try:
        rows = Order.objects.filter(pk=1)
        assert rows.get().fence_token == 0
        with connections["replica"].execute_wrapper(counted := Counter()):
            for given in (rows, Order.objects.exclude(customer__name="al")):
                with pytest.raises(FencedOutError):
                    fenced_update(given, 5, {"status": "x"}, raise_on_stale=True)
                assert fenced_update(given.all(), 6, {"status": "x"}, raise_on_stale=True)
        assert counted.number == 0
        assert fenced_update(rows.using("replica"), 5, {"status": "y"}, raise_on_stale=True)
        assert rows.get().status == "y"
    finally:
        Router.reads = None
    assert Order.objects.get().status == "x"


def case_a_transaction_is_fenced_as_a_whole() -> None:
    with fenced_transaction(token(5)):
        Order.objects.create(pk=1)
    with pytest.raises(ZeroDivisionError), fenced_transaction(token(6)):
        Order.objects.create(pk=2)
        raise ZeroDivisionError
    with pytest.raises(FencedOutError) as refused, fenced_transaction(token(4)):
        raise AssertionError("the body ran")
    assert (refused.value.token, refused.value.current) == (4, 5)
    with transaction.atomic():  # scenario 88
        with pytest.raises(FencedOutError), fenced_transaction([token(9, "b"), token(4)]):
            raise AssertionError("the body ran")
        Order.objects.create(pk=3)
    assert list(Order.objects.values_list("pk", flat=True)) == [1, 3]
    assert list(Fence.objects.values_list("resource", "token")) == [("a", 5)]


def case_a_sequence_orders_writes() -> None:
    for sequence in (1, 3):
        with fenced_transaction(token(5), sequence=sequence):
            pass
    for late in (2, 3):
        with pytest.raises(FencedOutError), fenced_transaction(token(5), sequence=late):
            raise AssertionError("the body ran")
    with fenced_transaction(token(5)):
        pass
    with fenced_transaction(token(6), sequence=1):
        pass


def case_an_operation_is_applied_once() -> None:
    # scenario 86
    seen = []
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        assert apply_once("pay", result=0).first
        raise ZeroDivisionError
    for attempt in range(2):
        with transaction.atomic():
            applied = apply_once("pay", token(5), result=[attempt], fingerprint="x")
            seen.append((applied.first, applied.result))
    assert seen == [(True, [0]), (False, [0])]
    with transaction.atomic():
        with pytest.raises(IdempotencyConflict):
            apply_once("pay", fingerprint="y")
        with pytest.raises(FencedOutError):
            apply_once("other", token(4))
        Order.objects.create(pk=1)


def case_a_block_remembers_or_leaves_nothing() -> None:
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError), operation("pay"):
            Order.objects.create(pk=1)
            raise ZeroDivisionError
        Order.objects.create(pk=2)
    for attempt in range(2):
        with operation("pay") as pay:
            if pay.first:
                pay.result = {"receipt": attempt}
            else:
                with pytest.raises(RuntimeError, match="applied before"):
                    pay.result = 1
        assert pay.result == {"receipt": 0}
    assert list(Order.objects.values_list("pk", flat=True)) == [2]


def case_the_loser_waits_and_applies_if_the_winner_rolls_back() -> None:
    # scenario 86
    if connection.vendor != "postgresql":  # there is one writer at a time
        return
    seen: list[bool] = []
    claimed = threading.Event()

    def loser() -> None:
        claimed.wait(20)
        with transaction.atomic():
            seen.append(apply_once("pay").first)
        connections.close_all()

    other = threading.Thread(target=loser)
    other.start()
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        assert apply_once("pay").first
        claimed.set()
        wait_for_a_waiter()
        assert seen == []
        raise ZeroDivisionError
    other.join(20)
    assert seen == [True]


def case_what_is_old_is_forgotten() -> None:
    with transaction.atomic():
        for number in range(5):
            apply_once(f"pay:{number}")
    Operation.objects.exclude(pk="pay:4").update(at=models.F("at") - timedelta(days=40))
    assert [purge_operations(timedelta(days=30), batch=3) for _ in range(3)] == [3, 1, 0]
    assert Operation.objects.get().pk == "pay:4"
    for number in range(3):
        with fenced_transaction(token(5, str(number))):
            pass
    Fence.objects.exclude(resource="2").update(at=models.F("at") - timedelta(days=40))
    assert [purge_fences(timedelta(days=30), batch=1) for _ in range(3)] == [1, 1, 0]
    assert Fence.objects.get().resource == "2"


def case_the_largest_batch_is_forgotten_at_once() -> None:
    old = timezone.now() - timedelta(days=40)
    number = 10_000
    Operation.objects.bulk_create(Operation(key=f"pay:{n}", at=old) for n in range(number))
    Fence.objects.bulk_create(
        Fence(kind="lock", resource=f"a{n}", token=1, at=old) for n in range(number)
    )
    for purge in (purge_operations, purge_fences):
        assert purge(timedelta(days=30), batch=number) == number


def case_what_is_applied_anew_is_not_forgotten() -> None:
    with transaction.atomic():
        for number in range(3):
            apply_once(str(number))
    Operation.objects.update(at=models.F("at") - timedelta(days=90))
    new = {"at": models.functions.Now()}
    if connection.vendor == "sqlite":  # nobody can come between
        Operation.objects.filter(pk="0").update(**new)
        assert purge_operations(timedelta(days=30)) == 2
        assert Operation.objects.get().pk == "0"
        return

    def between(execute: Any, sql: str, *rest: Any) -> Any:
        """Make a row new after the look, just before the DELETE."""
        if sql.startswith("DELETE"):
            with connections["default"].cursor() as cursor:
                cursor.execute("UPDATE fencekit_operations SET at = now() WHERE key = '1'")
        return execute(sql, *rest)

    held, done = threading.Event(), threading.Event()

    def holder() -> None:
        with transaction.atomic():
            Operation.objects.filter(pk="0").update(**new)
            held.set()
            done.wait(20)
        connections.close_all()

    other = threading.Thread(target=holder)
    other.start()
    assert held.wait(20)
    with connection.execute_wrapper(between):
        assert purge_operations(timedelta(days=30)) == 1
    done.set()
    other.join(20)
    assert sorted(Operation.objects.values_list("pk", flat=True)) == ["0", "1"]


def case_a_row_that_cannot_be_written_is_told() -> None:
    if connection.vendor != "postgresql":
        return
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
        )
        for table in ("fencekit_operations", "fencekit_fences"):
            cursor.execute(
                f"CREATE TRIGGER none BEFORE INSERT ON {table} "
                "FOR EACH ROW EXECUTE FUNCTION nothing()"
            )
        try:
            with pytest.raises(RuntimeError, match=r"'pay'.*trigger"), transaction.atomic():
                apply_once("pay")
            with pytest.raises(RuntimeError, match=r"'a'.*trigger"), fenced_transaction(token(5)):
                raise AssertionError("the body ran")
        finally:
            cursor.execute("DROP FUNCTION nothing CASCADE")


async def case_with_await() -> None:
    await Order.objects.acreate(pk=1)
    rows = Order.objects.filter(pk=1)
    assert await afenced_update(rows, 5, {"status": "a"})
    assert not await afenced_update(rows, 4, {"status": "stale"})
    with pytest.raises(FencedOutError):
        await afenced_update(rows, 4, {"status": "stale"}, raise_on_stale=True)

    def work() -> bool:
        with fenced_transaction(token(5)):
            return apply_once("pay").first

    assert await sync_to_async(work)()


def case_two_fingerprints_are_compared_and_one_alone_is_not() -> None:
    with transaction.atomic():
        apply_once("without")
        for mark in ("x", "y"):
            assert not apply_once("without", fingerprint=mark).first
        apply_once("with it", fingerprint="x")
        assert not apply_once("with it").first
        with pytest.raises(IdempotencyConflict, match="'with it'") as conflict:
            apply_once("with it", fingerprint="y")
        assert conflict.value.key == "with it"
        with operation("with it") as known, pytest.raises(RuntimeError, match="'with it'"):
            known.result = 1


def case_a_body_that_hides_an_error_does_not_end_as_if_it_had_committed() -> None:
    if connection.vendor != "postgresql":  # an error there ends nothing
        return
    with pytest.raises(DatabaseError), operation("hides"), suppress(DatabaseError):
        connection.cursor().execute("SELECT 1/0")
    assert not Operation.objects.filter(key="hides").exists()


class Encodes:
    """Half a codec."""

    def encode(self, value: object) -> str:
        return str(value)

    def decode(self, data: bytes) -> object:
        return data


def case_what_cannot_be_meant_is_refused_before_anything_is_sent() -> None:
    def entered(block: Any) -> None:
        with block:
            raise AssertionError("the body ran")

    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "using", lambda: entered(fenced_transaction(token(5), using=None))),  # type: ignore[arg-type]
        (ValueError, "nope", lambda: entered(operation("a", using="nope"))),
        (TypeError, "using", lambda: apply_once("a", using=b"default")),  # type: ignore[arg-type]
        (TypeError, "encode and decode", lambda: entered(operation("a", codec=object()))),  # type: ignore[arg-type]
        (TypeError, "encode and decode", lambda: apply_once("a", codec=object())),  # type: ignore[arg-type]
        (TypeError, "bytes, not str", lambda: apply_once("a", result=1, codec=Encodes())),  # type: ignore[arg-type]
    ]
    with connection.execute_wrapper(lambda *_: pytest.fail("something was sent")):
        for kind, why, use in wrong:
            with pytest.raises(kind, match=why):
                use()


def case_migrations_and_models_agree() -> None:
    call_command("makemigrations", "fencekit", check=True, dry_run=True, verbosity=0)


def main() -> None:
    for alias in connections:
        call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
    for name, case in list(globals().items()):
        if not name.startswith("case_"):
            continue
        for model in (Item, Rush, Order, Shelf, Customer, Old, Tag, Fence, Operation):
            model.objects.all().delete()
        if inspect.iscoroutinefunction(case):
            asyncio.run(case())
        else:
            case()
        print(name)


if __name__ == "__main__":
    main()
