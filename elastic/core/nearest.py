"""What an unknown key was probably meant to be. One rule for job files and for DeepSpeed's configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

# The valid keys of each section, by the section's path; () is the top level.
Keys = Mapping[tuple[str, ...], Sequence[str]]


def nearest_key(key: str, section: tuple[str, ...], keys: Keys) -> str:
    """A clause for an error message: one key of this section with a letter changed, the same key of another section,
    or the most similar key of this section."""
    names = list(keys.get(section, ()))
    slip = difflib.get_close_matches(key, names, n=1, cutoff=0.85)
    if slip:
        return f"did you mean {slip[0]!r}?"
    # Suggest keys of deeper sections only within that section; a key of several sections is ambiguous.
    owners = [other for other, others in keys.items() if other != section and key in others and len(other) <= 1]
    if len(owners) == 1:
        return f"{key!r} belongs under {owners[0][-1]!r}" if owners[0] else f"{key!r} belongs at the top level"
    # The letters may differ wholly ("num_workers"); sharing a word counts then.
    shared = [name for name in names if set(name.split("_")) & set(key.split("_"))]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6) or difflib.get_close_matches(
        key, shared or names, n=1, cutoff=0.0
    )
    return f"did you mean {near[0]!r}?" if near else "it takes no keys"
