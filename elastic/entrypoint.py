"""The user's training function, named in text: "module:function" or "path/to/file.py:function".

Workers load it here. The command line loads it once before any node is requested, so that a mistake costs nothing.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from elastic.core.errors import UsageError


@dataclass(frozen=True)
class EntryPoint:
    """`target` is the dotted name of a module or the absolute path of a file; modules are looked for in `folder`."""

    target: str
    function: str
    folder: str

    @property
    def is_file(self) -> bool:
        return self.target.endswith(".py")

    def __str__(self) -> str:
        return f"{self.target}:{self.function}"


def parse_entry_point(text: str, folder: str | Path = ".") -> EntryPoint:
    """Relative files are taken from `folder`. Raises UsageError for another form and for a file that is missing."""
    target, colon, function = text.rpartition(":")
    if not colon or not target or not all(part.isidentifier() for part in function.split(".")):
        raise UsageError(f"entry point {text!r} must be 'module:function' or 'path/to/file.py:function'")
    base = Path(folder).absolute()
    if not target.endswith(".py"):
        if not all(part.isidentifier() for part in target.split(".")):
            raise UsageError(f"entry point {text!r}: {target!r} is neither a module's name nor a file ending in .py")
        return EntryPoint(target, function, str(base))
    file = (base / Path(target).expanduser()).resolve()
    if not file.is_file():
        raise UsageError(f"entry point {text!r}: there is no file {file}")
    return EntryPoint(str(file), function, str(file.parent))


def load_entry_point(entry: EntryPoint | str) -> Callable[..., Any]:
    """The function itself. Importing runs the module's top level. Raises UsageError in one sentence."""
    entry = parse_entry_point(entry) if isinstance(entry, str) else entry
    if entry.folder not in sys.path:
        sys.path.insert(0, entry.folder)
    found: Any = _import(entry)
    for name in entry.function.split("."):
        if not hasattr(found, name):
            raise UsageError(f"entry point '{entry}': {entry.target} has no {name!r}{_nearest(name, found)}")
        found = getattr(found, name)
    check_function(found, f"entry point '{entry}'")
    function: Callable[..., Any] = found
    return function


def check_function(function: Any, what: str) -> None:
    """Raises UsageError for what cannot be called with the config, or without an argument."""
    if not callable(function):
        shown = f": {function!r}" if isinstance(function, str) else ""
        raise UsageError(f"{what} must be a function, but is of type {type(function).__name__!r}{shown}")
    if not _accepts(function, 1) and not _accepts(function, 0):
        shape = f"{getattr(function, '__name__', type(function).__name__)}{inspect.signature(function)}"
        raise UsageError(f"{what} is called with one argument, the config, but is {shape}")


def call_entry_point(function: Callable[..., Any], config: dict[str, Any] | None) -> Any:
    """Calls it with the config where it takes an argument, and without where it takes none."""
    return function(config or {}) if _accepts(function, 1) else function()


def _import(entry: EntryPoint) -> ModuleType:
    try:
        return _import_file(entry.target) if entry.is_file else importlib.import_module(entry.target)
    except SyntaxError as error:
        where = f"{error.filename} line {error.lineno}"
        raise UsageError(f"entry point '{entry}' does not import: {error.msg} in {where}") from error
    except ModuleNotFoundError as error:
        if error.name and (entry.target == error.name or entry.target.startswith(f"{error.name}.")):
            raise UsageError(f"entry point '{entry}': there is no module {error.name!r} in {entry.folder}") from error
        raise UsageError(f"entry point '{entry}' does not import: it needs {error.name!r}, not installed") from error
    except SystemExit as error:
        raise UsageError(
            f"entry point '{entry}' does not import: it exits at import; put its main part under "
            "`if __name__ == '__main__':`"
        ) from error
    # The user's module may raise anything; this is the edge where it becomes one sentence.
    except Exception as error:
        told = " ".join(str(error).split())
        raise UsageError(
            f"entry point '{entry}' does not import: {type(error).__name__}: {told}{_where(error, entry)}"
        ) from error


def _where(error: BaseException, entry: EntryPoint) -> str:
    """The place in the user's own code that is nearest to the error; "" where there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(entry.folder)]
    return f" in {own[-1].filename} line {own[-1].lineno}" if own else ""


def _package(file: Path) -> tuple[str, Path] | None:
    """(dotted name, folder of the topmost package) of a file that lies in packages; None for any other."""
    parts, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    return (".".join(parts), folder) if len(parts) > 1 else None


def _import_file(file: str) -> ModuleType:
    """A file in a package is imported as its module, so that relative imports work; any other by its own name."""
    package = _package(Path(file))
    if package is not None:
        name, folder = package
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        module = importlib.import_module(name)
        if Path(getattr(module, "__file__", None) or "").resolve() == Path(file).resolve():
            return module
        raise ImportError(f"{name} is {module.__file__}, which hides {file}; rename the package")
    name = Path(file).stem
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == file:
            return known
        name = f"elastic_entry_{name}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _accepts(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*[{}] * count)
    except TypeError:
        return False
    except ValueError:
        # Some callables written in C show no signature; they are tried as they are.
        return count == 1
    return True


def _nearest(name: str, found: Any) -> str:
    names = [key for key in dir(found) if callable(getattr(found, key)) and not key.startswith("_")]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
