"""What `test_django.py` runs: ``python -m tests.sql.django_cases URL``. Prints what it ran."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from datetime import timedelta
from typing import Any

from tests.sql.django_site import setup

setup(sys.argv[1])

import pytest  # noqa: E402
from asgiref.sync import sync_to_async  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import connection, connections, models, transaction  # noqa: E402

import fencekit  # noqa: E402
from fencekit import FencedOutError, FenceToken, IdempotencyConflict  # noqa: E402
from fencekit.django import (  # noqa: E402
    afenced_update,
    apply_once,
    fenced_transaction,
    fenced_update,
    operation,
    purge_operations,
)
from fencekit.django.models import Fence, Operation  # noqa: E402
from tests.sql.django_app.models import Old, Order  # noqa: E402


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
        with pytest.raises(ValueError, match="batch"):
            purge_operations(timedelta(1), batch=0)
        with pytest.raises(TypeError, match="fingerprint"):
            apply_once("a", fingerprint=7)  # type: ignore[arg-type]
    assert counted.number == 0


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
        with connections["default"].cursor() as cursor:
            number = 0
            while not number:
                cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
                (number,) = cursor.fetchone()
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


def case_migrations_and_models_agree() -> None:
    call_command("makemigrations", "fencekit", check=True, dry_run=True, verbosity=0)


def main() -> None:
    call_command("migrate", run_syncdb=True, verbosity=0)
    for name, case in list(globals().items()):
        if not name.startswith("case_"):
            continue
        for model in (Order, Old, Fence, Operation):
            model.objects.all().delete()
        if inspect.iscoroutinefunction(case):
            asyncio.run(case())
        else:
            case()
        print(name)


if __name__ == "__main__":
    main()
