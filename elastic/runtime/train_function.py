"""The user's training function on its way to the workers.

Either a name, resolved by each worker from the import paths that the submitter had, or, for functions defined in a
script or a notebook, the function itself as Ray ships it between its own processes. Nothing of it comes from storage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from elastic.entrypoint import EntryPoint, load_entry_point, parse_entry_point


@dataclass(frozen=True)
class Entry:
    """`point` names the function; or it is None and `pickled` holds the function.

    `keep_prints`: workers' output goes to files of the run instead of to Ray, which shows it to a driver that stays.
    `package`: the working directory of a job that was submitted with one. Ray unpacks it on every node, each where it
    keeps such things, so paths in it are read as paths in the worker's own working directory.
    """

    point: EntryPoint | None = None
    pickled: bytes | None = None
    paths: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    keep_prints: bool = False
    package: str | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], config: Mapping[str, Any] | None) -> Entry:
        """A function that this process has."""
        pickled: bytes = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
        paths = tuple(path for path in sys.path if path)
        return cls(pickled=pickled, paths=paths, config=config, package=_package())

    @classmethod
    def named(cls, target: str, config: Mapping[str, Any] | None, folder: str | None = None) -> Entry:
        """`target` is "module:function" or "file.py:function", looked for in `folder` first. Raises UsageError."""
        here = folder or str(Path.cwd())
        point, paths = parse_entry_point(target, here), (str(Path.cwd()),)
        return cls(point=point, paths=paths, config=config, keep_prints=True, package=_package())

    def load(self) -> Callable[..., Any]:
        """The function. Raises UsageError with one sentence when it cannot be loaded."""
        for path in map(self.here, reversed(self.paths)):
            if path not in sys.path:
                sys.path.append(path)
        if self.point is not None:
            point = replace(self.point, folder=self.here(self.point.folder))
            return load_entry_point(replace(point, target=self.here(point.target)) if point.is_file else point)
        assert self.pickled is not None
        function: Callable[..., Any] = cloudpickle.loads(self.pickled)
        return function

    def here(self, path: str) -> str:
        """A path of the submitting process, as this worker has it."""
        if self.package is None or not Path(path).is_relative_to(self.package):
            return path
        return str(Path.cwd() / Path(path).relative_to(self.package))


def _package() -> str | None:
    """This process's working directory, where it is one that Ray has unpacked for the job."""
    submitted = ray.is_initialized() and ray.get_runtime_context().runtime_env.get("working_dir")
    return str(Path.cwd()) if submitted else None
