"""Names of what error feedback keeps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.checkpoint.shares import basis_name, basis_of, is_share, residual_name, residual_of

PARAMETERS = st.text(min_size=1)


@given(st.integers(0, 10_000), PARAMETERS)
def test_names_say_what_they_name(island: int, parameter: str) -> None:
    residual, basis = residual_name(island, parameter), basis_name(parameter)
    assert is_share(residual)
    assert is_share(basis)
    assert (residual_of(residual), basis_of(residual)) == ((island, parameter), None)
    assert (residual_of(basis), basis_of(basis)) == (None, parameter)


def test_other_names_are_none() -> None:
    for name in ("weight", "state/average/0", "shared.weight"):
        assert not is_share(name)
        assert residual_of(name) is None
        assert basis_of(name) is None
