from __future__ import annotations

import argparse

import pytest

from elastic.training.advice import advice


def test_a_command_line_that_is_not_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    """Seen: "user code failed: 2"."""
    parser = argparse.ArgumentParser()
    with pytest.raises(SystemExit) as raised:
        parser.parse_args(["--node-ip-address=10.0.0.1"])
    assert "take options from the function's argument" in str(advice(raised.value))
    assert "`parser.parse_args([], argparse.Namespace(**config))`" in str(advice(raised.value))
    assert advice(SystemExit(3)) is None


def test_an_iteration_of_an_earlier_epoch() -> None:
    assert "for batch in loader)`" in str(advice(StopIteration()))


def test_a_process_group_of_its_own() -> None:
    """torch's own words, which the test of a real one in tests/one_rank pins."""
    error = ValueError("trying to initialize the default process group twice!")
    assert "remove the call" in str(advice(error))
    assert advice(ValueError("another")) is None
