"""Something to do with a module of another library: now where it is loaded, else when it is.

Importing it for this alone may take seconds, and most training functions never need it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Then = Callable[[ModuleType], None]

_waiting: dict[str, dict[str, Then]] = {}


def when_imported(name: str, then: Then, purpose: str = "") -> None:
    """Call `then(module)` once; a later call for the same purpose and module, if that is not loaded yet, takes the
    place of this one."""
    module = sys.modules.get(name)
    if module is not None:
        then(module)
        return
    _waiting.setdefault(name, {})[purpose] = then
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def forget(name: str) -> None:
    """What was to be done is not done any more."""
    _waiting.pop(name, None)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        waiting = _waiting.pop(fullname, None)
        if waiting is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                for then in waiting.values():
                    then(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
