"""The user's own small state: a dictionary of JSON values that is saved with every snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from elastic.core.errors import UsageError


class State(MutableMapping[str, Any]):
    """Values are kept in their JSON form at once (a tuple becomes a list), so that a value looks the same before and
    after a resume. Rank 0's values are saved, and every rank gets them on resume.

    Raises UsageError that names the key when a value is not JSON.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = _as_json(key, value)

    def __delitem__(self, key: str) -> None:
        del self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"State({self._values!r})"

    def dump(self) -> dict[str, Any]:
        """A copy in JSON form. Checks again: a list in the state may have been changed in place since it was set."""
        return {key: _as_json(key, value) for key, value in self._values.items()}

    def load(self, values: Mapping[str, Any]) -> None:
        """Restored values replace those set before the restore."""
        for key, value in values.items():
            self[key] = value


def _as_json(key: object, value: Any) -> Any:
    if not isinstance(key, str):
        raise UsageError(f"elastic.state takes string keys only; {key!r} is a {type(key).__name__}")
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"elastic.state[{key!r}] cannot be saved: {error}; use JSON values only") from error
