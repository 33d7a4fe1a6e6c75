"""The user's own part of a run's state: a dictionary of JSON values, and objects that keep state of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from elastic.core.checkpoint.manifest import Json
from elastic.core.errors import UsageError
from elastic.training.user.objects import ObjectState, install, kind_of, read


class State(MutableMapping[str, Any]):
    """Values are kept in their JSON form at once (a tuple becomes a list), so that a value looks the same before and
    after a resume. Rank 0's values are saved, and every rank gets them on resume; so it is with registered objects.

    Raises UsageError that names the key when a value is not JSON.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}
        # What the checkpoint has of objects that are not registered yet.
        self._waiting: dict[str, ObjectState] = {}
        self._device = torch.device("cpu")
        # What `capture` found last.
        self.captured: Mapping[str, ObjectState] = {}
        # The learning rates of the run's first step (see `rates`).
        self.first_rates: tuple[float, ...] = ()
        # The training function asks for saves.
        self.saves = False

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

    def clear(self) -> None:
        self._values.clear()
        self._objects.clear()

    @property
    def objects(self) -> Mapping[str, Any]:
        """Registered objects by name."""
        return self._objects

    def register(self, **objects: Any) -> None:
        """See `elastic.state.register`."""
        for name, target in objects.items():
            if target is None:
                self._objects.pop(name, None)
                self._waiting.pop(name, None)
                continue
            if self._objects.get(name, target) is not target:
                raise UsageError(
                    f"elastic.state.register({name}=...): a {kind_of(self._objects[name])} is registered under this "
                    "name already; use another name"
                )
            read(name, target)
            self._objects[name] = target
            self._install(name)

    def dump(self) -> dict[str, Any]:
        """A copy in JSON form. Checks again: a list in the state may have been changed in place since it was set."""
        return {key: _as_json(key, value) for key, value in self._values.items()}

    def load(self, values: Mapping[str, Any]) -> None:
        """Restored values replace those set before the restore."""
        for key, value in values.items():
            self[key] = value

    def capture(self) -> Mapping[str, ObjectState]:
        """Registered objects' state now, by name; its tensors are live. Raises UsageError for what cannot be kept."""
        self.captured = {name: read(name, target) for name, target in self._objects.items()}
        return self.captured

    def load_objects(self, saved: Mapping[str, ObjectState], device: torch.device) -> None:
        """Give registered objects their saved state, others when they are registered. Their tensors go to `device`
        where they were on a device of its kind. Raises UsageError for an object of another kind."""
        self._waiting, self._device = dict(saved), device
        for name in list(self._objects):
            self._install(name)

    def adopt(self, other: State) -> None:
        """Take over what was set and registered before the run began."""
        self.load(other)
        self.adopt_objects(other)

    def adopt_objects(self, other: State) -> None:
        """Take over the registered objects of a generation whose function continues: their state is loaded anew."""
        self._objects |= other._objects

    def require_claimed(self) -> None:
        """Raises UsageError where the checkpoint has objects that the training function did not register."""
        if self._waiting:
            name, saved = next(iter(self._waiting.items()))
            raise UsageError(
                f"the checkpoint has the state of {name!r} ({saved.kind}), which this training function has not "
                f"registered before its first batch: call elastic.state.register({name}=...), or "
                f"elastic.state.register({name}=None) to continue without it"
            )

    def waits_for(self, name: str) -> bool:
        """Has the checkpoint an object of this name that is not registered yet?"""
        return name in self._waiting

    def _install(self, name: str) -> None:
        saved = self._waiting.pop(name, None)
        if saved is not None:
            install(name, self._objects[name], saved, self._device)


def objects_to_json(objects: Mapping[str, ObjectState]) -> dict[str, Json]:
    """What a checkpoint keeps of `objects` besides their tensors, which are kept under `tensors_of`'s names."""
    return {
        name: {
            "kind": found.kind,
            "values": found.values,
            "tensors": [str(tensor.dtype).removeprefix("torch.") for tensor in found.tensors],
        }
        for name, found in objects.items()
    }


def tensors_of(objects: Mapping[str, ObjectState]) -> dict[str, torch.Tensor]:
    """The tensors of `objects` by the names that they have in a checkpoint."""
    return {
        tensor_name(name, number): tensor
        for name, found in objects.items()
        for number, tensor in enumerate(found.tensors)
    }


def objects_from_json(saved: Mapping[str, Json], tensors: Mapping[str, torch.Tensor]) -> dict[str, ObjectState]:
    """The inverse; `tensors` by `tensors_of`'s names, 1-D. Those without elements are not in a checkpoint."""

    def tensor(name: str, number: int, dtype: str) -> torch.Tensor:
        found = tensors.get(tensor_name(name, number))
        return torch.empty(0, dtype=getattr(torch, dtype)) if found is None else found

    return {
        name: ObjectState(
            entry["kind"],
            entry["values"],
            tuple(tensor(name, number, dtype) for number, dtype in enumerate(entry["tensors"])),
        )
        for name, entry in saved.items()
    }


def tensor_name(name: str, number: int) -> str:
    """Of one tensor of a registered object in a checkpoint. No tensor of a model can have it: "/" separates there."""
    return f"state/{name}/{number}"


def _as_json(key: object, value: Any) -> Any:
    if not isinstance(key, str):
        raise UsageError(f"elastic.state takes string keys only; {key!r} is a {type(key).__name__}")
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"elastic.state[{key!r}] cannot be saved: {error}; use JSON values only, and "
            "elastic.state.register for objects with a state_dict"
        ) from error
