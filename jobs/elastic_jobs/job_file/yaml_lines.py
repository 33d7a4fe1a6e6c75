"""YAML with line numbers, within limits, without repeated keys, and with 1e-3 as a number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from elastic.core.errors import UsageError

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """`lines` gives the line (from 1) of every key, by its path in `data`."""

    name: str
    data: Any
    lines: Mapping[Path, int] = field(default_factory=dict)

    def place(self, path: Sequence[str | int]) -> str:
        """ "job.yaml line 7", of the nearest key on the way to `path` that has a line."""
        for length in range(len(path), 0, -1):
            if tuple(path[:length]) in self.lines:
                return f"{self.name} line {self.lines[tuple(path[:length])]}"
        return self.name


# Far above what a job needs; aliases of aliases are counted each time they are used.
_MOST_VALUES = 100_000
_DEEPEST = 100


class _Loader(yaml.SafeLoader):
    pass


# PyYAML follows YAML 1.1, which reads 1e-3 as text; a learning rate that is text fails much later.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse(text: str, name: str) -> Document:
    """Raises UsageError with the line for anything that is not one YAML document."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[Path, int] = {}
        if node is not None:
            _Walk(name, lines).visit(node, ())
        data = loader.construct_document(node) if node is not None else None
        _check_values(data, (), Document(name, data, lines))
    except RecursionError as error:
        raise UsageError(f"{name}: nested more than {_DEEPEST} levels deep") from error
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: not valid YAML: {error}") from error
    finally:
        loader.dispose()
    return Document(name, data, lines)


class _Walk:
    """Visits all values of a document, aliases at each use: notes their lines, and refuses unlimited growth."""

    def __init__(self, name: str, lines: dict[Path, int]) -> None:
        self._name = name
        self._lines = lines
        self._values = 0
        self._above: list[yaml.Node] = []

    def visit(self, node: yaml.Node, path: Path) -> None:
        self._values += 1
        line = node.start_mark.line + 1
        if any(node is above for above in self._above):
            raise UsageError(f"{self._name} line {line}: an alias refers to a value that contains it")
        if self._values > _MOST_VALUES:
            raise UsageError(f"{self._name} line {line}: more than {_MOST_VALUES} values; aliases count each time")
        if len(self._above) >= _DEEPEST:
            raise UsageError(f"{self._name} line {line}: nested more than {_DEEPEST} levels deep")
        self._above.append(node)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, (*path, index))
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                self._key(key, path)
                self.visit(value, (*path, str(key.value)))
        self._above.pop()

    def _key(self, key: yaml.Node, path: Path) -> None:
        here, line = (*path, str(key.value)), key.start_mark.line + 1
        if here in self._lines and key.value != "<<":
            first = self._lines[here]
            raise UsageError(f"{self._name} line {line}: the key {key.value!r} was given before, in line {first}")
        self._lines[here] = line


def _check_values(data: Any, path: Path, document: Document) -> None:
    """Raises UsageError for values that JSON cannot represent: the job is stored as JSON."""
    if isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(key, str):
                raise UsageError(
                    f"{document.place([*path, str(key)])}: the key {key!r} is not text; put it into quotes"
                )
            _check_values(value, (*path, key), document)
    elif isinstance(data, list):
        for index, value in enumerate(data):
            _check_values(value, (*path, index), document)
    elif not isinstance(data, (str, int, float, bool, type(None))):
        what = f"{'.'.join(map(str, path))!r} is read as a {type(data).__name__}"
        raise UsageError(f"{document.place(path)}: {what}, which a job cannot hold; put it into quotes")
