"""Which files .gitignore files exclude, by git's rules (gitignore(5)). Pure; on relative paths with '/'.

Ray's own packaging honours .gitignore too, but evaluates each file separately: a nested `!keep` cannot re-include what
an outer file excludes, and .gitignore files above the packed folder are not read. Therefore we list the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """One line of an ignore file in the folder `base`, or above the root; `above` is then the path from there to the
    root."""

    regex: re.Pattern[str]
    negated: bool
    folders_only: bool
    base: str = ""
    above: str = ""

    def matches(self, path: str, is_folder: bool) -> bool:
        if self.folders_only and not is_folder:
            return False
        if self.base and not path.startswith(f"{self.base}/"):
            return False
        inside = path[len(self.base) + 1 :] if self.base else f"{self.above}/{path}" if self.above else path
        return self.regex.fullmatch(inside) is not None


def parse_patterns(lines: Iterable[str], base: str = "", above: str = "") -> tuple[Pattern, ...]:
    """The patterns of one file, without the lines that git skips."""
    found = (_parse(line.rstrip("\r\n"), base, above) for line in lines)
    return tuple(pattern for pattern in found if pattern is not None)


def ignored(path: str, is_folder: bool, patterns: Sequence[Pattern]) -> bool:
    """The last matching pattern decides; those of outer files come first in `patterns`.

    Folders above `path` are not considered: the caller does not enter an ignored folder.
    """
    for pattern in reversed(patterns):
        if pattern.matches(path, is_folder):
            return not pattern.negated
    return False


def _parse(line: str, base: str, above: str) -> Pattern | None:
    text = re.sub(r"(?<!\\) +$", "", line)
    if not text or text.startswith("#"):
        return None
    negated = text.startswith("!")
    text = text[1:] if negated else text
    folders_only = text.endswith("/")
    text = text.rstrip("/") if folders_only else text
    if not text:
        return None
    # A slash that is not at the end anchors the pattern to its folder; otherwise it matches at any depth.
    anchored = "/" in text
    body = _translate(text.lstrip("/"))
    try:
        regex = re.compile(body if anchored else f"(?:.*/)?{body}", re.DOTALL)
    except re.error:
        return None
    return Pattern(regex, negated, folders_only, base, above)


def _translate(text: str) -> str:
    """A glob as a regular expression: `*` and `?` stop at a slash, `**` between slashes does not."""
    out, position = "", 0
    while position < len(text):
        rest = text[position:]
        at_start = position == 0 or text[position - 1] == "/"
        if at_start and rest.startswith("**/"):
            out, position = f"{out}(?:.*/)?", position + 3
        elif at_start and rest == "**":
            out, position = f"{out}.+", position + 2
        elif rest[0] == "*":
            out, position = f"{out}[^/]*", position + len(rest) - len(rest.lstrip("*"))
        elif rest[0] == "?":
            out, position = f"{out}[^/]", position + 1
        elif rest[0] == "[" and (found := re.match(r"\[([!^]?)(\]?(?:\\.|[^\]\\])*)\]", rest, re.DOTALL)):
            out, position = f"{out}{_choice(found[1], found[2])}", position + found.end()
        elif rest[0] == "\\" and len(rest) > 1:
            out, position = f"{out}{re.escape(rest[1])}", position + 2
        else:
            out, position = f"{out}{re.escape(rest[0])}", position + 1
    return out


def _choice(negation: str, inside: str) -> str:
    """`[a-z]` and `[!a-z]`; neither matches a slash."""
    for name, letters in _CLASSES.items():
        inside = inside.replace(f"[:{name}:]", letters)
    safe = inside.replace("[", r"\[").replace("&&", r"&\&").replace("]", r"\]") if "\\" not in inside else inside
    return f"(?!/)[{'^' if negation else ''}{safe}]"


_CLASSES = {"alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z", "space": r" \t"}
