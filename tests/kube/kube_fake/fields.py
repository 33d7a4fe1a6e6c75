"""Server-side apply as a pure function: who owns which field, who conflicts, what is merged and what is taken away.

After the Kubernetes documentation, "Server-Side Apply". A path is a tuple of keys; an item of a list whose type is
"map" is named by its keys, every other list is one value.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Path = tuple[Any, ...]
Managers = Mapping[str, frozenset[Path]]
# Neither owned nor compared: they name the object, or the server sets them.
_IDENTITY = {
    ("apiVersion",),
    ("kind",),
    *(("metadata", key) for key in ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp")),
    ("metadata", "managedFields"),
}


@dataclass(frozen=True)
class ItemKey:
    """One item of a list of type "map": for example name=worker."""

    keys: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return "[" + ",".join(f'{key}="{value}"' for key, value in self.keys) + "]"

    def matches(self, item: Any) -> bool:
        return isinstance(item, dict) and all(item.get(key) == value for key, value in self.keys)


@dataclass(frozen=True)
class FieldConflict:
    manager: str
    path: Path


@dataclass(frozen=True)
class Applied:
    object: dict[str, Any]
    managers: dict[str, frozenset[Path]]


def leaves(value: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[Path, Any]:
    """The value of every field that can be owned."""
    return {path: item for path, item in _leaves(value, schema, ()) if not any(path[: len(i)] == i for i in _IDENTITY)}


def conflicts(
    live: Mapping[str, Any], managers: Managers, wanted: Mapping[str, Any], schema: Mapping[str, Any], manager: str
) -> list[FieldConflict]:
    """Fields that `wanted` would change and that somebody else has set."""
    now = leaves(live, schema)
    return [
        FieldConflict(other, path)
        for path, value in leaves(wanted, schema).items()
        for other, owned in managers.items()
        if other != manager and path in owned and now.get(path) != value
    ]


def apply(
    live: Mapping[str, Any], managers: Managers, wanted: Mapping[str, Any], schema: Mapping[str, Any], manager: str
) -> Applied:
    """`wanted` merged into `live`; what `manager` had applied before, and nobody else owns, goes."""
    now, new = leaves(live, schema), leaves(wanted, schema)
    others = {
        name: frozenset(path for path in owned if path not in new or now.get(path) == new[path])
        for name, owned in managers.items()
        if name != manager
    }
    shared = frozenset().union(*others.values())
    result = copy.deepcopy(dict(live))
    # What is no leaf any more was an empty object, into which others have put something since.
    gone = (managers.get(manager, frozenset()) - frozenset(new) - shared) & frozenset(now)
    for path in sorted(gone, key=_names_item):
        _remove(result, path)
    _merge(result, wanted, schema)
    return Applied(result, {**{name: owned for name, owned in others.items() if owned}, manager: frozenset(new)})


def updated(
    old: Mapping[str, Any], new: Mapping[str, Any], managers: Managers, schema: Mapping[str, Any], manager: str
) -> dict[str, frozenset[Path]]:
    """The owners after an ordinary update: who changes a field owns it, alone."""
    before, after = leaves(old, schema), leaves(new, schema)
    changed = frozenset(path for path, value in after.items() if path not in before or before[path] != value)
    kept = {name: frozenset(p for p in owned if p in after) - changed for name, owned in managers.items()}
    kept[manager] = kept.get(manager, frozenset()) | changed
    return {name: owned for name, owned in kept.items() if owned}


def dotted(path: Path) -> str:
    """As conflicts name it: ".spec.workerGroupSpecs"."""
    return "".join(str(part) if isinstance(part, ItemKey) else f".{part}" for part in path)


def _leaves(value: Any, schema: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, _below(schema, key), (*path, key))
    elif isinstance(value, list) and (keys := _map_keys(schema)):
        for item in value:
            yield from _leaves(item, schema["items"], (*path, _item_key(item, keys)))
    else:
        yield path, value


def _merge(live: dict[str, Any], wanted: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        below, now = _below(schema, key), live.get(key)
        if isinstance(value, dict) and isinstance(now, dict):
            _merge(now, value, below)
        elif isinstance(value, list) and isinstance(now, list) and (keys := _map_keys(below)):
            _merge_items(now, value, below, keys)
        else:
            live[key] = copy.deepcopy(value)


def _merge_items(live: list[Any], wanted: list[Any], schema: Mapping[str, Any], keys: list[str]) -> None:
    for item in wanted:
        key = _item_key(item, keys)
        found = next((now for now in live if key.matches(now)), None)
        if found is None:
            live.append(copy.deepcopy(item))
        else:
            _merge(found, item, schema["items"])


def _remove(live: Any, path: Path) -> None:
    """The field, and what is empty without it."""
    first, rest = path[0], path[1:]
    if isinstance(first, ItemKey):
        found = next((item for item in live if first.matches(item)), None)
        if found is not None and not _names_item(path):
            _remove(found, rest)
        elif found is not None and found.keys() <= {key for key, _ in first.keys}:
            live.remove(found)
    elif isinstance(live, dict) and first in live:
        if rest:
            _remove(live[first], rest)
        if not rest or live[first] in ({}, []):
            del live[first]


def _names_item(path: Path) -> bool:
    """A key of an item of a list: taken away last, and with it the item."""
    above = path[-2] if len(path) > 1 else None
    return isinstance(above, ItemKey) and path[-1] in {key for key, _ in above.keys}


def _below(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = schema.get("properties", {}).get(key) or {}
    return found


def _map_keys(schema: Mapping[str, Any]) -> list[str]:
    return list(schema.get("x-kubernetes-list-map-keys", [])) if schema.get("x-kubernetes-list-type") == "map" else []


def _item_key(item: Any, keys: list[str]) -> ItemKey:
    return ItemKey(tuple((key, item.get(key)) for key in keys if key in item))
