"""What a worker sets before it imports torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.runtime.worker.preload import use_huge_pages

NAME = "THP_MEM_ALLOC_ENABLE"


@pytest.mark.parametrize(
    ("kernel", "given", "then"),
    [
        ("always [madvise] never\n", None, "1"),
        ("always [madvise] never\n", "0", "0"),
        ("[always] madvise never\n", None, None),
        ("always madvise [never]\n", None, None),
        (None, None, None),
    ],
)
def test_huge_pages_are_asked_for_where_the_kernel_gives_them_to_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str | None, given: str | None, then: str | None
) -> None:
    # So that what is set is taken back.
    monkeypatch.setenv(NAME, "")
    monkeypatch.delenv(NAME)
    if given is not None:
        monkeypatch.setenv(NAME, given)
    if kernel is not None:
        (tmp_path / "enabled").write_text(kernel)
    use_huge_pages(tmp_path / "enabled")
    assert os.environ.get(NAME) == then
