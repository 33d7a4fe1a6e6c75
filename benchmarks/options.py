"""How much is measured, and where a case keeps its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """`quick`: a smoke run that shows that a case works; its figures mean nothing. `folder` is removed afterwards."""

    folder: Path
    quick: bool = False

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def make_folder(self, name: str) -> Path:
        made = self.folder / name
        made.mkdir(parents=True)
        return made
