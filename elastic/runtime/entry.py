"""The user's training function on its way to the workers.

Either a name, resolved by each worker from the import paths that the submitter had, or, for functions defined in a
script or a notebook, the function itself as Ray ships it between its own processes. Nothing of it comes from storage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import cloudpickle

from elastic.entrypoint import EntryPoint, load_entry_point, parse_entry_point


@dataclass(frozen=True)
class Entry:
    """`point` names the function; or it is None and `pickled` holds the function.

    `keep_prints`: workers' output goes to files of the run instead of to Ray, which shows it to a driver that stays.
    """

    point: EntryPoint | None = None
    pickled: bytes | None = None
    paths: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    keep_prints: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any], config: Mapping[str, Any] | None) -> Entry:
        """A function that this process has."""
        pickled: bytes = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
        return cls(pickled=pickled, paths=tuple(path for path in sys.path if path), config=config)

    @classmethod
    def named(cls, target: str, config: Mapping[str, Any] | None, folder: str | None = None) -> Entry:
        """`target` is "module:function" or "file.py:function", looked for in `folder` first. Raises UsageError."""
        here = folder or str(Path.cwd())
        return cls(point=parse_entry_point(target, here), paths=(str(Path.cwd()),), config=config, keep_prints=True)

    def load(self) -> Callable[..., Any]:
        """The function. Raises UsageError with one sentence when it cannot be had."""
        for path in reversed(self.paths):
            if path not in sys.path:
                sys.path.append(path)
        if self.point is not None:
            return load_entry_point(self.point)
        assert self.pickled is not None
        function: Callable[..., Any] = cloudpickle.loads(self.pickled)
        return function
