"""Router logits of a model of transformers, whose routers AutoEP replaces: an auxiliary loss is made of them.

DeepSpeed 0.19.8 takes transformers' table of what each class of models records for a plain dictionary with names of
classes for keys (module_inject/auto_ep_presets/base.py). That of transformers 5.24 is asked with a model, and without a
default: DeepSpeed ends with a TypeError, whatever is recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TABLE = "_CAN_RECORD_REGISTRY"


@contextmanager
def table_by_names() -> Iterator[None]:
    """While DeepSpeed replaces layers: a copy of the table, which it gives back as it was, that takes both."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    table = getattr(capturing, _TABLE, None)
    if not isinstance(table, dict) or type(table) is dict:
        yield
        return
    setattr(capturing, _TABLE, _ByNames(table))
    try:
        yield
    finally:
        setattr(capturing, _TABLE, table)


class _ByNames(dict[str, Any]):
    """`get` and assignment by the name of a class, or by a model of it."""

    def get(self, of: Any, default: Any = None) -> Any:
        found = super().get(_name(of), default)
        return found if isinstance(of, str) else found or {}

    def __setitem__(self, of: Any, recorded: Any) -> None:
        super().__setitem__(_name(of), recorded)


def _name(of: Any) -> str:
    return of if isinstance(of, str) else str(of.__class__)
