"""What the collectives of a set-up gave, for workers whose set-up comes later: the others are in their loops by then.

All ranks have the same of a broadcast, an all-reduce and an all-gather; so whoever comes later is given that, and has
what the others have in their variables. A sum, or one part of each rank, counts for as many ranks as there were.
"""

from __future__ import annotations

import inspect
import json
import pickle
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# All results together, in bytes: they travel with other messages.
_MOST_BYTES = 1 << 20

# By function: the argument that it fills, and whether what it gives depends on the number of ranks.
_FILLED = {
    "broadcast": ("tensor", False),
    "broadcast_object_list": ("object_list", False),
    "all_reduce": ("tensor", True),
    "all_gather": ("tensor_list", True),
    "all_gather_single": ("output_tensor", True),
    "all_gather_into_tensor": ("output_tensor", True),
    "all_gather_object": ("object_list", True),
}


# Gives a group, which is made anew in every generation.
_NEW_GROUP = "new_group"
_OPTIONS = ("backend", "timeout", "group_desc")


def recordable() -> dict[str, Callable[..., Any]]:
    """Those of torch.distributed whose results are kept, by name: as they are now."""
    return {name: getattr(dist, name) for name in (*_FILLED, _NEW_GROUP) if hasattr(dist, name)}


class Collective(NamedTuple):
    """One call. `said` is what is the same on all ranks: which function, and of what."""

    said: list[Any]
    filled: Any
    by_world_size: bool
    group: Any

    @classmethod
    def of(cls, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Collective | None:
        """None: what it gives is not there yet when it returns, or torch will refuse the arguments."""
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        given = bound.arguments
        if name == _NEW_GROUP:
            return cls._of_all(given)
        if given.get("async_op"):
            return None
        argument, by_world_size = _FILLED[name]
        filled = given[argument]
        root = given.get("group_src") if given.get("src") is None else given.get("src")
        objects = name.endswith(("object", "object_list"))
        said = [name, len(filled) if objects else _shapes(filled), str(given.get("op", "")), root or 0]
        return cls(said, filled, by_world_size, given.get("group"))

    @classmethod
    def _of_all(cls, given: Mapping[str, Any]) -> Collective | None:
        """Without ranks: a list of all that there are is maybe one of several, where they are more."""
        of_others = ("ranks", "pg_options", "device_id", "use_local_synchronization")
        if any(given.get(argument) for argument in of_others) or given.get("ranks") is not None:
            return None
        timeout = given.get("timeout")
        options = [given.get("backend"), timeout and timeout.total_seconds(), given.get("group_desc")]
        return cls([_NEW_GROUP, *(None if each is None else str(each) for each in options)], None, False, None)

    @property
    def makes_group(self) -> bool:
        return bool(self.said[0] == _NEW_GROUP)

    def results(self) -> list[bytes]:
        """Now: the function may change them later. Objects are pickled, as torch has done to send them."""
        if self.makes_group:
            return []
        if self._of_tensors:
            return [_raw(each) for each in self._tensors]
        return [pickle.dumps(list(self.filled))]

    def give(self, results: Sequence[bytes]) -> None:
        if self.makes_group:
            return
        if self._of_tensors:
            with torch.no_grad():
                for into, raw in zip(self._tensors, results, strict=True):
                    _fill(into, raw)
            return
        # Unpickled only where the script itself asks for objects of other ranks, as torch does.
        for number, each in enumerate(pickle.loads(results[0])):  # noqa: S301
            self.filled[number] = each

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [self.filled] if isinstance(self.filled, torch.Tensor) else list(self.filled)

    @property
    def _of_tensors(self) -> bool:
        return not self.said[0].endswith(("object", "object_list"))


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _fill(into: torch.Tensor, raw: bytes) -> None:
    if into.numel():
        into.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(into.dtype).reshape(into.shape))


def _shapes(filled: Any) -> list[Any]:
    tensors = [filled] if isinstance(filled, torch.Tensor) else filled
    return [[*each.shape, str(each.dtype)] if isinstance(each, torch.Tensor) else None for each in tensors]


@dataclass
class Recording:
    """Of the set-up that all `world_size` ranks of `generation` did together: of each collective in turn what was said
    and what it gave. `why`: nobody can be given it."""

    generation: int = -1
    world_size: int = 0
    made: list[tuple[list[Any], bool, list[bytes]]] = field(default_factory=list)
    why: str = ""
    _bytes: int = 0

    def take(self, call: Collective) -> bool:
        """After it. False: its results are too large."""
        try:
            results = call.results()
        except Exception as error:  # noqa: BLE001 - the user's objects
            self.why = f"what {call.said[0]} gave cannot be kept ({type(error).__name__}: {error})"
            return False
        self._bytes += sum(map(len, results))
        if self._bytes > _MOST_BYTES:
            self.why = f"its collectives gave more than {_MOST_BYTES >> 20} MiB"
            return False
        self.made.append((call.said, call.by_world_size, results))
        return True

    def give(self, number: int, call: Collective, world_size: int) -> str:
        """Fill in what the collective of this number gave. Returns why it cannot; empty where it has."""
        if number >= len(self.made):
            return f"{call.said[0]} is one collective more than the {number} of the other workers' set-up"
        said, by_world_size, results = self.made[number]
        if said != call.said:
            return f"its collective {number + 1} is {call.said[0]}, where that of the other workers was {said[0]}"
        if by_world_size and world_size != self.world_size:
            return self._of_another_size(said, world_size)
        call.give(results)
        return ""

    def unfit(self, world_size: int) -> str:
        """Why a set-up among so many ranks cannot be given this; empty where it can."""
        by_size = next((said for said, by_world_size, _ in self.made if by_world_size), None)
        return "" if by_size is None or world_size == self.world_size else self._of_another_size(by_size, world_size)

    def _of_another_size(self, said: Sequence[Any], world_size: int) -> str:
        return f"{said[0]} in its set-up was among {self.world_size} ranks, and there are {world_size} from here on"

    def groups(self) -> list[dict[str, Any]]:
        """The arguments of `torch.distributed.new_group` for each one that was made, in this order."""
        found = []
        for said, _, _ in self.made:
            if said[0] == _NEW_GROUP:
                backend, timeout, description = said[1:]
                limit = None if timeout is None else timedelta(seconds=float(timeout))
                found.append(dict(zip(_OPTIONS, (backend, limit, description), strict=True)))
        return found

    def packed(self) -> bytes:
        made = [[said, by_size, [b64encode(one).decode() for one in results]] for said, by_size, results in self.made]
        return json.dumps([self.generation, self.world_size, made]).encode()

    @classmethod
    def unpacked(cls, packed: bytes) -> Recording:
        generation, world_size, made = json.loads(packed)
        results = [(said, by_size, [b64decode(one) for one in results]) for said, by_size, results in made]
        return cls(generation, world_size, results)
