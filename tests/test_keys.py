"""Idempotency keys of payloads and of calls: what is equal, what is distinct, what is refused."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import pickle
import subprocess
import sys
import types
from collections import OrderedDict, UserString, deque
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from fractions import Fraction
from hashlib import sha256
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencekit.errors import CanonicalizeError
from fencekit.keys import call_key, idempotency_key

UTC = timezone.utc


def key(payload: object, **options: Any) -> str:
    return idempotency_key(payload, namespace="n", **options)


def refused(payload: object, **options: Any) -> CanonicalizeError:
    with pytest.raises(CanonicalizeError) as caught:
        key(payload, **options)
    return caught.value


class Color(str, Enum):
    RED = "red"


class Size(IntEnum):
    BIG = 3


class Plain(Enum):
    RED = "red"
    CRIMSON = "red"
    BLUE = "blue"


class Other(Enum):
    RED = "red"


class Rights(Flag):
    READ = 1
    WRITE = 2


@dataclass
class Order:
    number: int
    note: Any = None


@dataclass
class Refund:
    number: int
    note: Any = None


@dataclass(order=True)
class Prioritized:
    priority: int
    item: Any = field(compare=False)


class Point(NamedTuple):
    x: int
    y: int


class Inner(pydantic.BaseModel):
    at: datetime
    price: Decimal


class Model(pydantic.BaseModel):
    inner: Inner
    name: str = "x"


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    ),
    max_leaves=20,
)
payloads = json_values.filter(
    lambda v: v is not None and not (isinstance(v, str) and not v.strip())
)


class TestJson:
    @given(payloads)
    def test_text_of_a_json_payload_is_the_published_one(self, payload: Any) -> None:
        text = json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        assert key(payload) == f"n:{sha256(text.encode()).hexdigest()}"

    def test_keys_of_earlier_versions_never_change(self) -> None:
        assert key({"b": [1, None], "a": "ä"}) == (
            "n:847d613442ae70ec251d2ed0647cb38a4f17e66567bc2204cb21a3670a2ef6a5"
        )
        assert key({}) == "n:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"

    # scenario 58
    @pytest.mark.parametrize(
        "value",
        [
            (1, 2),
            {1: "a"},
            ["ä", "😀"],
            1.0,
            -0.0,
            True,
            [[], [[]], ()],
            [],
            {},
            {9: "a", 10: "b", 2.5: "c", True: "d", None: "e"},
            {"a": (1, (2,))},
            Color.RED,
            {Color.RED: Size.BIG},
            Point(1, 2),
            OrderedDict(b=1, a=2),
            10**300,
            1e300,
        ],
    )
    def test_key_is_the_same_on_both_sides_of_a_transport(self, value: Any) -> None:
        assert key([value]) == key([json.loads(json.dumps(value))])
        assert key([value]) == key([pickle.loads(pickle.dumps(value))])

    # scenario 58
    @given(
        st.dictionaries(
            st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False)), json_values
        )
    )
    def test_mapping_keys_count_as_json_sends_them(self, payload: dict[Any, Any]) -> None:
        sent = json.loads(json.dumps(payload))
        if len(sent) == len(payload):
            assert key(payload) == key(sent)

    # scenario 58
    def test_look_alikes_are_distinct(self) -> None:
        values = [
            1,
            "1",
            True,
            1.0,
            "True",
            "true",
            [1],
            ["1"],
            {"1": 1},
            [None],
            ["null"],
            0,
            False,
        ]
        assert len({key(value) for value in values}) == len(values)

    def test_none_in_a_transport_is_none(self) -> None:
        assert key([None]) == key(json.loads(json.dumps([None])))

    def test_any_mapping_and_sequence_counts_as_its_content(self) -> None:
        assert key(types.MappingProxyType({"a": 1})) == key({"a": 1})
        assert key(deque([0, 1])) == key(range(2)) == key([0, 1])

    def test_subclasses_with_their_own_text_count_as_their_value(self) -> None:
        class Loud(int):
            def __repr__(self) -> str:
                return "loud"

            __str__ = __repr__

        class Shout(str):
            def __str__(self) -> str:
                return "shout"

        assert key([Loud(3), Shout("a")]) == key([3, "a"])

    @pytest.mark.parametrize(
        "payload", [{1: "a", "1": "b"}, {True: "a", "true": "b"}, {None: 1, "null": 2}]
    )
    def test_keys_that_json_would_merge_are_refused(self, payload: Any) -> None:
        assert "same canonical key" in str(refused(payload))


class TestForms:
    # scenario 59
    def test_every_form_is_stable_and_distinct(self) -> None:
        values = [
            UUID(int=1),
            datetime(2024, 1, 1),
            datetime(2024, 1, 1, tzinfo=UTC),
            date(2024, 1, 1),
            time(12),
            time(12, tzinfo=UTC),
            timedelta(seconds=1),
            timedelta(seconds=-1),
            Decimal("1.0"),
            Decimal("-1.0"),
            Decimal("0"),
            Plain.RED,
            Plain.BLUE,
            Other.RED,
            Rights.READ | Rights.WRITE,
            Rights.READ,
            b"a",
            b"",
            {1, 2},
            set(),
            Order(1),
            Refund(1),
            Inner(at=datetime(2024, 1, 1), price=Decimal(1)),
            # and what they look like
            str(UUID(int=1)),
            "2024-01-01",
            "1.0",
            1,
            1.0,
            "red",
            "a",
            [1, 2],
            [],
            {},
            {"number": 1, "note": None},
            3,
        ]
        assert len({key([value]) for value in values}) == len(values)
        for value in values:
            assert key([value]) == key([pickle.loads(pickle.dumps(value))])

    def test_forms_never_change(self) -> None:
        text = (
            'fencekit/1 {"at":@instant(1704067200000000),"by":@enum("%s:Plain","RED"),'
            '"day":@date("2024-01-01"),"id":@uuid("00000000000000000000000000000001"),'
            '"left":@timedelta(-500000),"local":@datetime("2024-01-01T00:00:00.000000"),'
            '"no":@decimal(0),"of":@dataclass("%s:Order",{"note":@bytes("00ff"),"number":1}),'
            '"price":@decimal(-15E-1),"rights":@flag("%s:Rights",3),"set":@set("a",1),'
            '"t":@time("12:00:00.000000"),"tz":@utctime(39600000000)}'
        ) % ((__name__,) * 3)
        payload = {
            "at": datetime(2024, 1, 1, tzinfo=UTC),
            "by": Plain.RED,
            "day": date(2024, 1, 1),
            "id": UUID(int=1),
            "left": timedelta(seconds=-0.5),
            "local": datetime(2024, 1, 1),
            "no": Decimal("-0.00"),
            "of": Order(1, b"\x00\xff"),
            "price": Decimal("-1.50"),
            "rights": Rights.READ | Rights.WRITE,
            "set": {1, "a"},
            "t": time(12),
            "tz": time(12, tzinfo=timezone(timedelta(hours=1))),
        }
        assert key(payload) == f"n:{sha256(text.encode()).hexdigest()}"

    # scenario 59
    def test_equal_instants_are_one_key_and_naive_times_another(self) -> None:
        berlin = datetime(2024, 7, 1, 14, tzinfo=ZoneInfo("Europe/Berlin"))
        utc = datetime(2024, 7, 1, 12, tzinfo=UTC)
        assert key([berlin]) == key([utc])
        assert len({key([utc]), key([utc.replace(tzinfo=None)]), key([utc.isoformat()])}) == 3

    def test_the_repeated_hour_is_two_instants(self) -> None:
        first = datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
        assert key([first]) != key([first.replace(fold=1)])

    def test_times_at_the_ends_of_the_calendar_have_keys(self) -> None:
        east, west = timezone(timedelta(hours=14)), timezone(timedelta(hours=-12))
        assert key([datetime.min.replace(tzinfo=east)]) != key([datetime.min.replace(tzinfo=UTC)])
        assert key([datetime.max.replace(tzinfo=west)]) != key([datetime.max.replace(tzinfo=UTC)])

    def test_a_zone_without_offset_is_naive(self) -> None:
        assert key([time(12, tzinfo=ZoneInfo("Europe/Berlin"))]) == key([time(12)])

    @given(st.datetimes(timezones=st.timezones()), st.timezones())
    def test_the_zone_of_an_instant_does_not_count(self, at: datetime, zone: ZoneInfo) -> None:
        try:
            moved = at.astimezone(zone)
        except OverflowError:
            return
        assert key([at.astimezone(UTC)]) == key([moved])

    # scenario 59: a missed duplicate is a double charge
    @pytest.mark.parametrize(
        ("one", "two"),
        [("1.0", "1.00"), ("100", "1E+2"), ("-0", "0.00"), ("1E-7", "0.00000010")],
    )
    def test_equal_decimals_are_one_key(self, one: str, two: str) -> None:
        assert key([Decimal(one)]) == key([Decimal(two)])

    @given(
        st.decimals(allow_nan=False, allow_infinity=False),
        st.decimals(allow_nan=False, allow_infinity=False),
    )
    def test_decimals_are_one_key_exactly_when_equal(self, one: Decimal, two: Decimal) -> None:
        assert (key([one]) == key([two])) == (one == two)
        assert key([one]) == key([Decimal(f"{one:f}")])

    def test_decimals_are_not_rounded(self) -> None:
        digits = "1" * 60
        assert key([Decimal(digits + "1")]) != key([Decimal(digits + "2")])
        assert key([Decimal("1E+999999")]) != key([Decimal("1E+999998")])

    def test_enum_aliases_are_one_key_and_mixed_in_values_are_plain(self) -> None:
        assert key([Plain.RED]) == key([Plain.CRIMSON])
        assert key([Color.RED]) == key(["red"])
        assert key([Size.BIG]) == key([3])

    def test_bytes_and_sets_count_by_content(self) -> None:
        assert key([b"ab"]) == key([bytearray(b"ab")])
        assert key([{1, "a", b"x"}]) == key([frozenset([b"x", "a", 1])])
        assert key([{1, 2}]) != key([{1, 3}])
        assert key([{frozenset([1]), frozenset([2])}]) != key([{frozenset([1, 2])}])

    def test_dataclasses_count_with_class_and_all_fields(self) -> None:
        @dataclass
        class Swapped:
            note: Any
            number: int

        assert key(Order(1, "a")) == key(Order(note="a", number=1))
        assert len({key(v) for v in (Order(1), Order(2), Refund(1), Swapped(None, 1))}) == 4
        # what a comparison leaves out may still be the work itself
        assert key(Prioritized(1, "a")) != key(Prioritized(1, "b"))

    def test_pydantic_models_count_field_by_field(self) -> None:
        at = datetime(2024, 1, 1, 12, tzinfo=UTC)
        inner = Inner(at=at, price=Decimal("1.0"))
        same = Inner(at=at.astimezone(timezone(timedelta(hours=3))), price=Decimal("1.00"))
        assert key(Model(inner=inner)) == key(Model(inner=same, name="x"))
        assert key(Model(inner=inner)) != key(Model(inner=inner, name="y"))
        assert key(inner) != key(inner.model_dump())
        assert key(Open(a=1, copy=2)) == key(Open(copy=2, a=1))
        assert key(Open(a=1, copy=2)) != key(Open(a=1, copy=3))

    def test_old_pydantic_models_count_field_by_field(self) -> None:
        # The shape of pydantic 1, whose own package warns on newer Pythons.
        class Old:
            __fields__ = {"a": object(), "b": object()}  # noqa: RUF012
            __config__ = types.SimpleNamespace(extra="ignore")

            def __init__(self, **state: Any) -> None:
                self.__dict__.update(state)

        class OldOpen(Old):
            __config__ = types.SimpleNamespace(extra="allow")

        assert key(Old(a=1, b=2)) == key(Old(b=2, a=1, cached=3))
        assert key(Old(a=1, b=2)) != key(Old(a=1, b=3))
        assert key(OldOpen(a=1, b=2, c=3)) != key(OldOpen(a=1, b=2, c=4))
        assert key(Old(a=1, b=2)) != key(OldOpen(a=1, b=2))
        assert refused({"m": Old(a=1)}).path == "payload['m'].b"

    def test_mapping_keys_may_be_forms(self) -> None:
        day = date(2024, 1, 1)
        assert key({day: 1, "a": 2}) == key({"a": 2, day: 1})
        assert key({day: 1}) != key({day.isoformat(): 1})
        assert key({(1, 2): 1}) != key({"[1,2]": 1})

    def test_a_payload_cannot_imitate_a_form(self) -> None:
        day = date(2024, 1, 1)
        fakes: list[Any] = [
            {"$date": "2024-01-01"},
            ["date", "2024-01-01"],
            '@date("2024-01-01")',
            {"__type__": "date", "__value__": "2024-01-01"},
        ]
        assert key([day]) not in {key([fake]) for fake in fakes}
        assert key([day]) not in {key(fake) for fake in fakes}


class TestInjective:
    values = st.recursive(
        st.one_of(
            scalars,
            st.binary(max_size=3),
            st.dates(),
            st.datetimes(),
            st.datetimes(timezones=st.just(UTC)),
            st.timedeltas(),
            st.uuids(),
            st.decimals(allow_nan=False, allow_infinity=False, places=2),
            st.sampled_from([*Plain, *Other, *Rights]),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner),
            st.dictionaries(st.sampled_from(["a", "b", "1", "@set(1)", "a,b"]), inner, max_size=3),
            st.builds(Order, st.integers(0, 2), inner),
            st.builds(Refund, st.integers(0, 2), inner),
            st.frozensets(st.one_of(st.integers(0, 3), st.text(max_size=2)), max_size=3),
        ),
        max_leaves=6,
    )

    @staticmethod
    def reference(value: Any) -> Any:
        """The equality keys promise, spelled with types instead of text."""
        refer = TestInjective.reference
        if isinstance(value, (list, tuple)):
            return ("list", tuple(map(refer, value)))
        if isinstance(value, dict):
            return ("dict", frozenset((name, refer(item)) for name, item in value.items()))
        if isinstance(value, (Order, Refund)):
            return (type(value), value.number, refer(value.note))
        if isinstance(value, frozenset):
            return ("set", frozenset(map(refer, value)))
        if isinstance(value, float):
            return ("float", value, math.copysign(1, value))
        aware = isinstance(value, datetime) and value.tzinfo is not None
        return (type(value), aware, value)

    @given(values, values)
    def test_keys_are_equal_exactly_when_the_values_are(self, one: Any, two: Any) -> None:
        equal = self.reference(one) == self.reference(two)
        assert (key([one]) == key([two])) == equal


class TestRefused:
    # scenario 59
    @pytest.mark.parametrize(
        "value",
        [
            math.nan,
            math.inf,
            -math.inf,
            Decimal("NaN"),
            Decimal("sNaN"),
            Decimal("-Infinity"),
            object(),
            Fraction(1, 2),
            1j,
            Money,
            len,
            memoryview(b"a"),
            UserString("a"),
            "\ud800",
            {"\udfff": 1},
            {math.nan: 1},
            {object(): 1},
            {math.nan},
            10**5000,
            {1: "a", "1": "b"},
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_error_names_the_place(self, value: Any) -> None:
        error = refused({"a": [value]})
        assert error.path.startswith("payload['a'][0]")
        assert str(error).startswith(error.path)

    def test_path_goes_through_every_kind_of_container(self) -> None:
        bad = object()
        assert refused({"a": [0, bad]}).path == "payload['a'][1]"
        assert refused({1: {None: bad}}).path == "payload[1][None]"
        assert refused(Order(1, bad)).path == "payload.note"
        assert refused({date(2024, 1, 1): bad}).path == "payload[<date>]"
        assert refused([{bad}]).path == "payload[0]{...}"
        assert refused({"k" * 500: bad}).path.endswith("...]")
        assert refused({10**4000: bad}).path == "payload[<int>]"

    def test_error_keeps_values_to_itself(self) -> None:
        class Secret:
            def __repr__(self) -> str:
                return "hunter2"

        assert "hunter2" not in str(refused([Secret()]))

    def test_cycles_and_depth(self) -> None:
        loop: list[Any] = [1]
        loop.append({"again": loop})
        assert "contains itself" in str(refused(loop))
        shared = [1]
        assert key([shared, shared]) == key([[1], [1]])
        nested: Any = 1
        for _ in range(100):
            nested = [nested]
        key(nested)
        assert "levels deep" in str(refused([nested]))

    def test_integers_are_exact(self) -> None:
        assert key(2**53) != key(2**53 + 1)
        assert key(10**4000) != key(10**4000 + 1)

    def test_two_elements_or_keys_of_one_form(self) -> None:
        # Equal as instants, although Python holds datetimes in a fold for unequal.
        folded = datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin"))
        pair = [folded, folded.astimezone(UTC)]
        assert "another element" in str(refused([set(pair)]))
        assert "another entry" in str(refused(dict.fromkeys(pair, 1)))

    def test_unset_field(self) -> None:
        order = Order(1)
        del order.number
        assert refused([order]).path == "payload[0].number"

    def test_times_finer_than_a_microsecond(self) -> None:
        class Fine(datetime):
            nanosecond = 1

        class NotATime(datetime):
            def __ne__(self, other: object) -> bool:
                return True

            __hash__ = datetime.__hash__

        assert refused([Fine(2024, 1, 1)]).path == "payload[0]"
        assert refused([NotATime(2024, 1, 1)]).path == "payload[0]"

    def test_objects_that_lie_about_their_class(self) -> None:
        class Proxy:
            __class__ = str  # type: ignore[assignment]

        assert refused([Proxy()]).path == "payload[0]"

    # scenario 64
    @pytest.mark.parametrize("nothing", [None, "", " ", "\t\n\u2003"])
    def test_nothing_is_no_payload(self, nothing: Any) -> None:
        assert "None or blank" in str(refused(nothing))

    @pytest.mark.parametrize(
        ("namespace", "error"),
        [
            ("", ValueError),
            (" ", ValueError),
            ("a:b", ValueError),
            ("a b", ValueError),
            ("a\u2028b", ValueError),
            ("\ud800", ValueError),
            ("a" * 1000, ValueError),
            (None, TypeError),
            (b"a", TypeError),
            (True, TypeError),
        ],
    )
    def test_namespace(self, namespace: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match="namespace"):
            idempotency_key({}, namespace=namespace)

    def test_namespaces_are_distinct(self) -> None:
        assert idempotency_key(1, namespace="a") != idempotency_key(1, namespace="b")
        assert idempotency_key(1, namespace=Color.RED).startswith("red:")


class TestEncode:
    def test_is_asked_for_unknown_objects_only(self) -> None:
        asked: list[Any] = []

        def encode(value: Any) -> Any:
            asked.append(value)
            return value.cents

        money = Money(5)
        payload = [1, "a", date(2024, 1, 1), {"m": money}]
        assert key(payload, encode=encode) == key(
            [1, "a", date(2024, 1, 1), {"m": Money(5)}], encode=lambda value: value.cents
        )
        assert asked == [money]

    def test_result_counts_with_the_class(self) -> None:
        class Cents(Money):
            pass

        keys = {key([value], encode=lambda value: value.cents) for value in (Money(5), Cents(5), 5)}
        assert len(keys) == 3
        assert key([Money(5)], encode=vars) != key([Money(6)], encode=vars)

    def test_result_may_hold_unknown_objects_again(self) -> None:
        def encode(value: Any) -> Any:
            return (
                [str(value)] if isinstance(value, Fraction) else {"half": Fraction(value.cents, 2)}
            )

        assert key(Money(5), encode=encode) != key(Money(6), encode=encode)

    @pytest.mark.parametrize("encode", [lambda _: None, lambda value: value])
    def test_forgotten_replacement_is_refused(self, encode: Any) -> None:
        assert "without a replacement" in str(refused([Money(5)], encode=encode))

    def test_refusal_names_the_place_and_other_errors_pass(self) -> None:
        def refuse(value: Any) -> Any:
            raise TypeError("no money")

        def broken(value: Any) -> Any:
            raise RuntimeError("bug")

        error = refused({"m": Money(5)}, encode=refuse)
        assert error.path == "payload['m']"
        assert "no money" in str(error)
        with pytest.raises(RuntimeError):
            key(Money(5), encode=broken)


def test_keys_are_the_same_in_every_process() -> None:
    program = (
        "from fencekit.keys import *\n"
        "from decimal import Decimal\n"
        "def f(*args, **kwargs): ...\n"
        "names = {str(n) for n in range(50)}\n"
        "print(idempotency_key({n: names for n in names}, namespace='n'))\n"
        "print(call_key(f, (names,), {n: Decimal(1) for n in names}))\n"
    )
    outputs = set()
    for seed in ("0", "1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1


# Calls


def charge(order: Any, cents: int = 100, *, currency: str = "EUR") -> None: ...


def loose(*args: Any, **kwargs: Any) -> None: ...


def passthrough(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def unnamed(function: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Shop:
    def __init__(self, name: str = "") -> None:
        self.name = name

    def charge(self, order: int, cents: int = 100) -> None: ...

    @passthrough
    def wrapped(self, order: int) -> None: ...

    @classmethod
    def open(cls, name: str) -> None: ...

    @staticmethod
    def close(name: str) -> None: ...

    def __call__(self, order: int) -> None: ...


class Branch(Shop):
    pass


class TestCall:
    # scenario 61
    def test_every_way_to_write_a_call_is_one_key(self) -> None:
        def f(x: int = 5, y: int = 6) -> None: ...

        assert call_key(f, (5,)) == call_key(f, (), {"x": 5}) == call_key(f)
        assert call_key(f, (), {"x": 1, "y": 2}) == call_key(f, (), {"y": 2, "x": 1})
        assert call_key(f, (1, 2)) == call_key(f, [1], {"y": 2})
        assert call_key(f, (5,)) != call_key(f, (6,))

    # scenario 61
    @given(st.integers(), st.integers(), st.booleans(), st.booleans())
    def test_positional_and_keyword_arguments_are_one(
        self, order: int, cents: int, named: bool, swapped: bool
    ) -> None:
        pairs = [("order", order), ("cents", cents)]
        kwargs = dict(reversed(pairs) if swapped else pairs)
        args = () if named else (kwargs.pop("order"),)
        assert call_key(charge, args, kwargs) == call_key(charge, (order, cents))

    # scenario 62
    def test_calls_that_glue_or_mix_would_confuse_are_distinct(self) -> None:
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((("value", 1),), {}),
            ((), {"value": 1}),
            (("value", 1), {}),
            (("a:b", "c"), {}),
            (("a", "b:c"), {}),
            (("", "a"), {}),
            (("a", ""), {}),
            (("a",), {}),
            ((), {"a": ""}),
            (({"value": 1},), {}),
            ((["a"],), {}),
            ((), {}),
            (((),), {}),
            ((), {"args": ["a"]}),
        ]
        keys = {call_key(loose, args, kwargs) for args, kwargs in calls}
        assert len(keys) == len(calls)

    # scenario 62
    def test_functions_of_one_name_in_two_modules_are_distinct(self) -> None:
        source = "def f(x): ..."
        functions = []
        for name in ("app.one", "app.two"):
            module = types.ModuleType(name)
            exec(source, module.__dict__)
            functions.append(module.f)
        one, two = functions
        assert call_key(one, (1,)) != call_key(two, (1,))
        assert call_key(one, (1,), namespace="n") != call_key(two, (1,), namespace="n")

    def test_a_call_is_no_payload(self) -> None:
        digest = call_key(charge, (1,), namespace="n")
        assert digest not in {key({"order": 1}), key([charge.__qualname__, {"order": 1}])}

    def test_spawned_child_agrees_with_its_parent(self) -> None:
        def as_module(name: str) -> Any:
            module = types.ModuleType(name)
            exec("def f(x): ...", module.__dict__)
            return module.f

        assert call_key(as_module("__main__"), (1,)) == call_key(as_module("__mp_main__"), (1,))

    def test_methods_leave_self_out_and_keep_its_class(self) -> None:
        key_ = call_key(Shop("a").charge, (1,))
        assert key_ == call_key(Shop("b").charge, (), {"order": 1, "cents": 100})
        assert key_ != call_key(Branch("a").charge, (1,))
        assert call_key(Shop.open, ("a",)) != call_key(Branch.open, ("a",))
        assert call_key(Shop().open, ("a",)) == call_key(Shop.open, ("a",))
        assert call_key(Shop.close, ("a",)) == call_key(Shop().close, (), {"name": "a"})
        assert call_key(Shop(), (1,)) == call_key(Shop(), (), {"order": 1})
        assert call_key(Shop().wrapped, (1,)) == call_key(Shop().wrapped, (), {"order": 1})
        assert call_key(Shop, ("a",)) == call_key(Shop, (), {"name": "a"})

    def test_explicit_self_must_be_encodable_or_left_out(self) -> None:
        with pytest.raises(CanonicalizeError, match="argument self of"):
            call_key(Shop.charge, (Shop(), 1))
        call_key(Shop.charge, (Shop(), 1), only=("order",))

    def test_partial_is_its_function_with_arguments(self) -> None:
        bound = functools.partial(charge, 7, currency="USD")
        assert call_key(bound, (5,)) == call_key(charge, (7, 5), {"currency": "USD"})
        assert call_key(bound, (), {"currency": "EUR"}) == call_key(charge, (7,))
        assert call_key(functools.partial(bound, 5)) == call_key(bound, (5,))
        updated = functools.update_wrapper(functools.partial(charge, 8), charge)
        assert call_key(updated) == call_key(charge, (8,))
        assert call_key(functools.partial(Shop().charge, 1)) == call_key(Shop().charge, (1,))

    def test_partial_bound_as_a_method_is_refused(self) -> None:
        odd = types.MethodType(functools.partial(charge, 1), Shop())
        with pytest.raises(TypeError, match="no order"):
            call_key(odd, (1,))

    def test_wrapped_function_is_the_function(self) -> None:
        assert call_key(passthrough(charge), (1,)) == call_key(charge, (), {"order": 1})
        assert call_key(functools.lru_cache(charge), (1,)) == call_key(charge, (1,))
        assert call_key(passthrough(passthrough(charge)), (1,)) == call_key(charge, (1,))

    def test_declared_signature_is_what_callers_pass(self) -> None:
        wrapper = passthrough(charge)
        wrapper.__signature__ = inspect.signature(lambda order: None)
        assert call_key(wrapper, (1,)) == call_key(wrapper, (), {"order": 1})
        with pytest.raises(TypeError):
            call_key(wrapper, (1, 2))

    # scenario 62
    def test_names_that_functions_share_need_a_namespace(self) -> None:
        for shared in (lambda x: x, unnamed(charge)):
            with pytest.raises(ValueError, match="namespace="):
                call_key(shared, (1,))
            assert call_key(shared, (1,), namespace="mine").startswith("mine:")

    def test_callables_without_a_name_or_signature(self) -> None:
        class Loop:
            def __call__(self) -> None: ...

        loop = Loop()
        loop.__wrapped__ = loop  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="wraps itself"):
            call_key(loop)
        with pytest.raises(TypeError, match="needs a callable"):
            call_key(5)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            call_key(dict.fromkeys, (1, 2, 3, 4))
        nameless = type("Nameless", (), {"__call__": staticmethod(functools.partial(charge, 1))})()
        with pytest.raises(TypeError, match="no name"):
            call_key(nameless)
        with pytest.raises(TypeError, match="cannot tell its arguments"):
            call_key(max, (1, 2))
        assert call_key(len, ([1],)) != call_key(len, ([2],))

    def test_callables_that_cannot_be_remembered(self) -> None:
        class Meta(type):
            __hash__ = None  # type: ignore[assignment]

        class Odd(metaclass=Meta):
            def __init__(self, a: int = 1) -> None: ...

        assert call_key(Odd, (1,)) == call_key(Odd)

    def test_arguments_that_do_not_fit_are_a_type_error(self) -> None:
        for args, kwargs in (((), {}), ((1, 2, 3), {}), ((1,), {"order": 1}), ((1,), {"no": 1})):
            with pytest.raises(TypeError, match=r"charge\(\): "):
                call_key(charge, args, kwargs)

    # scenario 59
    def test_unencodable_argument_is_named(self) -> None:
        with pytest.raises(CanonicalizeError) as caught:
            call_key(charge, ({"a": [object()]},))
        assert caught.value.path == "order['a'][0]"
        assert f"argument order['a'][0] of {__name__}:charge" in str(caught.value)
        with pytest.raises(CanonicalizeError) as caught:
            call_key(loose, (1, object()))
        assert caught.value.path == "args[1]"
        assert call_key(charge, (Money(1),), encode=vars) != call_key(charge, (1,))

    def test_only_restricts_the_arguments(self) -> None:
        one = call_key(charge, (1, 100), only=("order",))
        assert one == call_key(charge, (1, 200), only=["order"])
        assert one != call_key(charge, (2, 100), only=("order",))
        both = call_key(charge, (1, 2), only=("order", "cents"))
        assert both == call_key(charge, (1, 2), only=("cents", "order"))
        assert call_key(charge, (object(), 2), only=("cents",)) == call_key(
            charge, (None, 2), only=("cents",)
        )
        every = call_key(charge, (1,), only=("order", "cents", "currency"))
        assert every == call_key(charge, (1,))
        assert call_key(charge, (1,), only=()) == call_key(charge, (2,), only=())

    def test_only_reaches_into_keyword_arguments(self) -> None:
        one = call_key(loose, (1,), {"order": 5}, only=("order",))
        assert one == call_key(loose, (2,), {"order": 5, "trace": 9}, only=("order",))
        assert one != call_key(loose, (1,), {"order": 6}, only=("order",))

    # scenario 64
    def test_only_never_selects_nothing(self) -> None:
        for nothing in (None, "", "  "):
            with pytest.raises(CanonicalizeError, match="None or blank"):
                call_key(charge, (nothing,), only=("order",))
        call_key(charge, (None,))
        call_key(charge, (None,), only=("order", "cents"))
        with pytest.raises(CanonicalizeError) as caught:
            call_key(loose, (), {"other": 1}, only=("order",))
        assert caught.value.path == "order"

    def test_only_that_the_function_does_not_have(self) -> None:
        with pytest.raises(TypeError, match="'ordr'"):
            call_key(charge, (1,), only=("order", "ordr"))
        with pytest.raises(TypeError, match="add a comma"):
            call_key(charge, (1,), only="order")

    def test_namespace_is_the_name_of_the_function(self) -> None:
        assert call_key(charge, (1,)).startswith("charge:")
        assert call_key(Shop().charge, (1,)).startswith("Shop.charge:")
        assert call_key(charge, (1,), namespace="n").startswith("n:")
        with pytest.raises(ValueError, match="namespace"):
            call_key(charge, (1,), namespace="a:b")

        def odd(x: int) -> None: ...

        odd.__qualname__ = "a b:c" * 200
        namespace, colon, digest = call_key(odd, (1,)).partition(":")
        assert len(namespace) == 200
        assert len(digest) == 64
        assert colon
