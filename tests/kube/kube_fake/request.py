"""What a test reads and sets: the requests that were answered, and the faults that it asks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """One that was answered, for a test to ask about afterwards. `verb` is the API's."""

    verb: str
    resource: str
    namespace: str | None
    name: str | None
    dry_run: bool
    manager: str
    user: str
    code: int


@dataclass
class Fault:
    """What goes wrong: `times` requests of a verb and a resource ("*" for any) get HTTP `code`; 0 drops the connection.

    A dry run is left alone unless `dry_runs`.
    """

    verb: str
    resource: str
    code: int
    times: int = 1
    dry_runs: bool = False
