"""How much is measured, and where a case keeps its files."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """`quick`: a smoke run that shows that a case works; its figures mean nothing. `folder` is removed afterwards.

    `plan`: of the case `recovery` the first plan, and those whose names have this in them, or one of several ("a; b").

    After `ends_at` (of `time.monotonic`) a case begins no further repetition, and says that there are fewer.
    """

    folder: Path
    quick: bool = False
    ends_at: float = math.inf
    plan: str = ""

    @property
    def over(self) -> bool:
        return time.monotonic() > self.ends_at

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def make_folder(self, name: str) -> Path:
        made = self.folder / name
        made.mkdir(parents=True)
        return made
