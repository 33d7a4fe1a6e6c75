"""What `import elastic` offers, and what it does not drag in."""

from __future__ import annotations

import subprocess
import sys

import pytest

import elastic


def test_every_public_name_is_there() -> None:
    assert elastic.__all__ == sorted(elastic.__all__)
    for name in elastic.__all__:
        assert getattr(elastic, name) is not None
    assert set(elastic.__all__) <= set(dir(elastic))


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="initialise"):
        _ = elastic.initialise  # type: ignore[attr-defined]


def test_importing_the_package_imports_neither_torch_nor_ray() -> None:
    code = "import sys, elastic; print([name for name in ('torch', 'ray', 'deepspeed') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
