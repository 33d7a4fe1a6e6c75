"""YAML that knows its line numbers, rejects repeated keys, and reads 1e-3 as a number."""

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


class _Loader(yaml.SafeLoader):
    pass


# YAML 1.1, which PyYAML follows, reads 1e-3 as text, and a learning rate that is text is found out much later.
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
            _walk(node, (), lines, name)
        data = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: not valid YAML: {error}") from error
    finally:
        loader.dispose()
    return Document(name, data, lines)


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], name: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*path, index), lines, name)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        here = (*path, str(key.value))
        line = key.start_mark.line + 1
        if here in lines and key.value != "<<":
            raise UsageError(f"{name} line {line}: the key {key.value!r} was given before, in line {lines[here]}")
        lines[here] = line
        _walk(value, here, lines, name)
