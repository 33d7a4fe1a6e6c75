"""The user's training function on its way to the workers.

Either a name ("module:function" with the import paths that the submitter had) or, for functions defined in a script or
a notebook, the function itself as Ray ships it between its own processes. Nothing of this ever comes from storage.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic.core.errors import UsageError


@dataclass(frozen=True)
class Entry:
    """`target` is "module:function" or "path/to/file.py:function"; or None when `pickled` holds the function."""

    target: str | None = None
    pickled: bytes | None = None
    paths: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Callable[..., Any], config: Mapping[str, Any] | None) -> Entry:
        from ray import cloudpickle

        return cls(
            pickled=cloudpickle.dumps(function),  # type: ignore[no-untyped-call]
            paths=tuple(p for p in sys.path if p),
            config=config,
        )

    @classmethod
    def named(cls, target: str, config: Mapping[str, Any] | None, folder: str | None = None) -> Entry:
        here = [folder] if folder else []
        return cls(target=target, paths=(*here, str(Path.cwd())), config=config)

    def load(self) -> Callable[..., Any]:
        """The function. Raises UsageError with one sentence when it cannot be had."""
        for path in reversed(self.paths):
            if path not in sys.path:
                sys.path.insert(0, path)
        if self.pickled is not None:
            from ray import cloudpickle

            function: Callable[..., Any] = cloudpickle.loads(self.pickled)
            return function
        assert self.target is not None
        module_name, _, name = self.target.rpartition(":")
        try:
            module = _from_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
            function = getattr(module, name)
        except (ImportError, AttributeError, OSError) as error:
            raise UsageError(f"the entry point {self.target!r} cannot be loaded: {error}") from error
        return function


def _from_file(path: str) -> Any:
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as the import system does: dataclasses and pickling look it up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
