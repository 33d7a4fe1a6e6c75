"""pydantic's findings as one sentence that names the place, the key and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from elastic_jobs.job_file.yaml_lines import Document

Keys = Mapping[tuple[str, ...], Sequence[str]]


def sentence(error: ValidationError, document: Document, keys: Keys) -> str:
    """The first finding, with a count of the others. `keys` are the valid keys of each section."""
    findings = error.errors(include_url=False)
    # An unknown key is the likeliest cause of a missing one, so it is told first.
    findings.sort(key=lambda finding: finding["type"] != "extra_forbidden")
    first = findings[0]
    path = [part for part in first["loc"] if not _is_branch(part)]
    text = f"{document.place(path)}: {_what(first, path, keys)}"
    others = len({finding["loc"] for finding in findings}) - 1
    return f"{text} (and {others} more)" if others > 0 and first["type"] == "extra_forbidden" else text


def nearest_key(key: str, section: tuple[str, ...], keys: Keys) -> str:
    """What `key` was probably meant to be: one of this section but for a letter, the same key of another section, or
    the most similar of this one."""
    names = list(keys.get(section, ()))
    slip = difflib.get_close_matches(key, names, n=1, cutoff=0.85)
    if slip:
        return f"did you mean {slip[0]!r}?"
    for other, others in keys.items():
        # A key of a part of a section belongs there only for whoever is in that section; "name" is a key of many.
        if other != section and key in others and len(other) <= 1:
            return f"{key!r} belongs under {other[-1]!r}" if other else f"{key!r} belongs at the top level"
    # The letters may differ wholly ("num_workers"); sharing a word counts then.
    shared = [name for name in names if set(name.split("_")) & set(key.split("_"))]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6) or difflib.get_close_matches(
        key, shared or names, n=1, cutoff=0.0
    )
    return f"did you mean {near[0]!r}?" if near else "it takes no keys"


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
