"""The function behind a callable, and the arguments that a call of it binds. No I/O."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from fencekit._canonical import is_nothing, type_name
from fencekit.errors import CanonicalizeError

_MAX_WRAPPERS = 100


class Target:
    """The function behind a callable: its name, its owner's class, and the arguments for it."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if not callable(function):
            raise TypeError(f"call_key needs a callable, not {type(function).__name__}")
        self.args, self.kwargs = args, dict(kwargs)
        self.owners: list[str] = []
        found: Any = function
        for _ in range(_MAX_WRAPPERS):
            inner = self._unwrap(found)
            if inner is None:
                break
            found = inner
        else:
            raise TypeError(f"{function!r} wraps itself, or is wrapped too often to be named")
        self.function, self.owner, self.bound = found, "/".join(self.owners), len(self.owners)
        self.qualname = getattr(found, "__qualname__", None) or ""
        if not self.qualname:
            raise TypeError(f"{function!r} has no name to make a key of; wrap it in a function")
        self.name = type_name(found)

    def _unwrap(self, found: Any) -> Any:
        """What is one layer further in, or None at the function itself."""
        if isinstance(found, partial):
            # Before __wrapped__: update_wrapper() on a partial hides its arguments.
            if self.owners:
                raise TypeError(f"{found!r} is bound as a method: its arguments have no order")
            self.args = (*found.args, *self.args)
            self.kwargs = {**found.keywords, **self.kwargs}
            return found.func
        if isinstance(found, MethodType):
            # An inherited method has its base's name: the class tells A().m from B().m.
            owner = found.__self__
            self.owners.append(type_name(owner if isinstance(owner, type) else type(owner)))
            return found.__func__
        if hasattr(found, "__signature__") and hasattr(found, "__qualname__"):
            return None  # as inspect.signature(): it says what callers pass
        if hasattr(found, "__wrapped__"):
            return found.__wrapped__
        if isinstance(found, type):
            return None
        call = getattr(found, "__call__", None)  # noqa: B004 -- the method itself is wanted
        return call if isinstance(call, MethodType) else None

    def refuse_shared_name(self) -> None:
        """Lambdas of a module, and wrappers made by one decorator, all have the same name."""
        closure = "<locals>" in self.qualname and getattr(self.function, "__closure__", None)
        if closure or "<lambda>" in self.qualname:
            raise ValueError(
                f"{self.name} is a name that several functions share: pass namespace= to tell "
                "them apart, or use functools.wraps if it is a decorator's wrapper"
            )

    def bind(self) -> dict[str, Any]:
        try:
            bound = _signature(self.function, self.bound).bind(*self.args, **self.kwargs)
        except TypeError as error:
            raise TypeError(f"{self.qualname}(): {error}") from None
        bound.apply_defaults()
        return bound.arguments

    def select(self, arguments: dict[str, Any], only: Iterable[str]) -> dict[str, Any]:
        if isinstance(only, (str, bytes)):
            raise TypeError(f"only must be a tuple of argument names, not {only!r}: add a comma")
        extra = self._keyword_extras(arguments)
        known = {**(extra or {}), **arguments}
        chosen = {name: known.get(name) for name in only}
        for name in sorted(chosen.keys() - known.keys()):
            message = (
                f"only= names argument {name!r}, which this call of {self.name} does not have "
                f"among {', '.join(known) or 'none'}"
            )
            raise TypeError(message) if extra is None else CanonicalizeError(message, path=name)
        if chosen and all(map(is_nothing, chosen.values())):
            path = ", ".join(chosen)
            raise CanonicalizeError(
                f"argument {path} of {self.name} is None or blank, and unrelated calls would "
                "share the key: check the call, or choose other arguments with only=",
                path=path,
            )
        return chosen

    def _keyword_extras(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        for parameter in _signature(self.function, self.bound).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                extras: dict[str, Any] = arguments[parameter.name]
                return extras
        return None


_signatures: WeakKeyDictionary[Any, dict[int, inspect.Signature]] = WeakKeyDictionary()


def _signature(function: Any, bound: int) -> inspect.Signature:
    """The signature without the first *bound* parameters; reading it costs more than binding."""
    try:
        known = _signatures.setdefault(function, {})
    except TypeError:  # not hashable or not weakly referable
        known = {}
    if bound not in known:
        view = function
        for _ in range(bound):
            view = MethodType(view, view)
        try:
            known[bound] = inspect.signature(view)
        except ValueError as error:  # some builtins have none
            raise TypeError(f"cannot tell its arguments: {error}") from None
    return known[bound]
