"""Dataclasses as JSON and back, driven by their annotations: exact, strict, and without code in the data.

Supported are numbers, strings, booleans, None, enums, dataclasses, tuples, lists, sets, frozensets, mappings, Literal,
Any (plain JSON values), and unions of dataclasses with None. A mapping is a list of pairs, so that keys keep their type
and order; a member of a union of several dataclasses is a pair of its name and its fields.

A class of another kind names the type as which it is written in `JSON_FORM`, and is made of such a value.

A field with `NOT_KEPT` as metadata is left out; reading gives it its default, or what the caller hands over.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

NOT_KEPT: Mapping[str, bool] = {"kept": False}

_T = TypeVar("_T")
_Code = Callable[[Any], Any]
_COLLECTIONS: Mapping[Any, Callable[[Any], Any]] = {list: list, set: set, frozenset: frozenset}
_SCALARS: Mapping[Any, tuple[type, ...]] = {
    int: (int,), float: (float, int), str: (str,), bool: (bool,), type(None): (type(None),),
}  # fmt: skip


def encode(value: Any) -> dict[str, Any]:
    """A dataclass instance as JSON values."""
    kind: Any = type(value)
    encoded: dict[str, Any] = _coder(kind)[0](value)
    return encoded


def decode(cls: type[_T], data: Any, **given: Any) -> _T:
    """Inverse of `encode`. `given` are fields of `cls` that were not kept.

    Raises ValueError where `data` has other fields than `cls`, or values of another type: another version wrote it.
    """
    kind: Any = cls
    made: _T = _coder(kind)[1](data)
    vars(made).update(given)
    return made


@cache
def _coder(kind: Any) -> tuple[_Code, _Code]:
    """(encoder, decoder) for a type."""
    origin, args = get_origin(kind), get_args(kind)
    if (form := getattr(kind, "JSON_FORM", None)) is not None:
        put, get = _coder(form)
        return put, lambda data: kind(get(data))
    if kind is Any or origin is Literal:
        return _same, _same
    if kind in _SCALARS:
        return _same, _scalar(kind)
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is tuple:
        return _tuple(args)
    if origin in _COLLECTIONS:
        (put, get), make = _coder(args[0]), _COLLECTIONS[origin]
        return (lambda value: [put(item) for item in value]), (lambda data: make([get(item) for item in _list(data)]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(args)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return (lambda value: value.value), kind
    if dataclasses.is_dataclass(kind):
        return _record(kind)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _named_tuple(kind)
    raise TypeError(f"{kind} has no JSON form here")


def _same(value: Any) -> Any:
    return value


def _scalar(kind: Any) -> _Code:
    allowed = _SCALARS[kind]

    def read(data: Any) -> Any:
        if type(data) not in allowed:
            raise ValueError(f"{data!r} where {kind.__name__} is expected")
        return data

    return read


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"{data!r} where a list is expected")
    return data


def _tuple(args: tuple[Any, ...]) -> tuple[_Code, _Code]:
    if len(args) == 2 and args[1] is Ellipsis:
        put, get = _coder(args[0])
        return (lambda value: [put(item) for item in value]), (lambda data: tuple([get(item) for item in _list(data)]))
    coders = [_coder(arg) for arg in args]

    def write(value: Any) -> Any:
        return [coder[0](item) for coder, item in zip(coders, value, strict=True)]

    def read(data: Any) -> Any:
        return tuple(coder[1](item) for coder, item in zip(coders, _list(data), strict=True))

    return write, read


def _mapping(args: tuple[Any, ...]) -> tuple[_Code, _Code]:
    (put_key, get_key), (put, get) = _coder(args[0]), _coder(args[1])

    def write(value: Any) -> Any:
        return [[put_key(key), put(item)] for key, item in value.items()]

    return write, lambda data: {get_key(key): get(item) for key, item in _list(data)}


def _union(args: tuple[Any, ...]) -> tuple[_Code, _Code]:
    some = [arg for arg in args if arg is not type(None)]
    if len(some) == 1:
        put, get = _coder(some[0])
        return (lambda value: None if value is None else put(value)), lambda data: None if data is None else get(data)
    if not all(dataclasses.is_dataclass(arg) for arg in some):
        raise TypeError(f"a union of {args} has no JSON form here")
    by_name: dict[str, Any] = {arg.__name__: arg for arg in some}

    def write(value: Any) -> Any:
        if value is None:
            return None
        name = type(value).__name__
        return [name, _coder(by_name[name])[0](value)]

    def read(data: Any) -> Any:
        if data is None and len(some) < len(args):
            return None
        name, fields = _list(data)
        if name not in by_name:
            raise ValueError(f"{name!r} is none of {', '.join(by_name)}")
        return _coder(by_name[name])[1](fields)

    return write, read


def _named_tuple(kind: Any) -> tuple[_Code, _Code]:
    put, get = _tuple(tuple(get_type_hints(kind)[name] for name in kind._fields))
    return put, lambda data: kind(*get(data))


def _record(cls: Any) -> tuple[_Code, _Code]:
    hints = get_type_hints(cls)
    kept = {f.name: _coder(hints[f.name]) for f in dataclasses.fields(cls) if f.metadata.get("kept", True)}
    rest = [f for f in dataclasses.fields(cls) if f.name not in kept]

    def write(value: Any) -> Any:
        return {name: coder[0](getattr(value, name)) for name, coder in kept.items()}

    def read(data: Any) -> Any:
        if not isinstance(data, dict) or data.keys() != kept.keys():
            raise ValueError(f"not the fields of {cls.__name__}")
        values = {name: coder[1](data[name]) for name, coder in kept.items()}
        for left in rest:
            if left.default is not dataclasses.MISSING:
                values[left.name] = left.default
            elif left.default_factory is not dataclasses.MISSING:
                values[left.name] = left.default_factory()
        # Not by __init__: frozen and mutable dataclasses, with constructors of their own or not, are filled alike.
        made = object.__new__(cls)
        vars(made).update(values)
        return made

    return write, read
