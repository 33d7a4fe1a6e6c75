"""pydantic's findings as one sentence that names the place, the key and what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from elastic.core.nearest import Keys, nearest_key
from elastic_jobs.job_file.yaml_lines import Document


def sentence(error: ValidationError, document: Document, keys: Keys) -> str:
    """The first finding, with a count of the others. `keys` are the valid keys of each section."""
    findings = error.errors(include_url=False)
    # An unknown key is the likeliest cause of a missing one, so it is reported first.
    findings.sort(key=lambda finding: finding["type"] != "extra_forbidden")
    first = findings[0]
    path = [part for part in first["loc"] if not _is_branch(part)]
    text = f"{document.place(path)}: {_what(first, path, keys)}"
    others = len({finding["loc"] for finding in findings}) - 1
    return f"{text} (and {others} more)" if others > 0 and first["type"] == "extra_forbidden" else text


def _what(finding: Any, path: Sequence[str | int], keys: Keys) -> str:
    name = ".".join(str(part) for part in path)
    match finding["type"]:
        case "extra_forbidden":
            # The items of a list have the same keys, whichever they are.
            section = tuple(part for part in path[:-1] if isinstance(part, str))
            return f"unknown key {name!r}; {nearest_key(str(path[-1]), section, keys)}"
        case "missing":
            return f"the key {name!r} is missing"
        case "value_error":
            return str(finding["ctx"]["error"])
        case _:
            wanted = str(finding["msg"]).replace("Input should", "should")
            return f"{name!r} {wanted}, but is {finding['input']!r}"


def _is_branch(part: str | int) -> bool:
    """pydantic names the members of a union in its paths, for example "dict[str,any]"; no key looks like that."""
    return isinstance(part, str) and (part in {"str", "int", "float"} or "[" in part)
