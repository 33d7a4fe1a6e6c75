"""Print what caught each mutation: `python -m verification [--only M1 M2] [--reshards 1000]`, in the folder `tests`.

Ends with 1 when a mutation was not caught, made no difference or hung a rank, or when a healthy reshard was refused.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TextIO

_ROW = "{:<5} {:<40} {:<50} {:<6} {:<39} {:>4}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m verification", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="ID", help="these mutations only")
    parser.add_argument("--reshards", type=int, default=0, metavar="N", help="healthy reshards after the table")
    options = parser.parse_args()
    _quiet()
    failed = _table(options.only)
    if options.reshards:
        failed += _healthy(options.reshards)
    _cost()
    return 1 if failed else 0


def _quiet() -> None:
    """The table is all that is to be seen; what DeepSpeed says at every engine is not."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _to(stream: TextIO) -> Callable[[str], None]:
    """Say a line there, whatever is silenced meanwhile."""

    def say(line: str) -> None:
        stream.write(f"{line}\n")
        stream.flush()

    return say


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _table(only: list[str] | None) -> int:
    from elastic.engines.deepspeed.kind import KIND
    from elastic.training.cleanup import warm_up
    from verification.corpus import corpus
    from verification.run import examine

    say = _to(sys.stdout)
    say(_ROW.format("id", "mutation", "configuration", "W", "caught by", "s"))
    failed = 0
    with _silent():
        # Imports, not part of anyone's seconds.
        warm_up(KIND)
        chosen = [mutation for mutation in corpus() if not only or mutation.id in only]
        for mutation in chosen:
            verdict = examine(mutation)
            caught = verdict.caught if verdict.good else f"NOT CAUGHT: {verdict.problem}"
            worlds = "{}->{}".format(*mutation.worlds)
            row = (mutation.id, mutation.what, str(mutation.setup), worlds, caught, f"{verdict.seconds:.1f}")
            say(_ROW.format(*row))
            failed += not verdict.good
    say(f"{len(chosen) - failed} of {len(chosen)} caught before the first step; unverified, each does harm")
    return failed


def _healthy(wanted: int) -> int:
    from verification.healthy import PER_SETUP, reshards

    say = _to(sys.stdout)
    began, wrong = time.perf_counter(), []
    setups = -(-wanted // PER_SETUP)
    with _silent():
        for seed in range(setups):
            wrong += reshards(seed)
    for line in wrong:
        say(line)
    seconds = time.perf_counter() - began
    say(f"{setups * PER_SETUP} healthy reshards of {setups} random setups: {len(wrong)} wrong ({seconds:.0f} s)")
    return len(wrong)


def _cost() -> None:
    from verification.cost import seconds_per_gb

    say = _to(sys.stdout)
    parts = (f"{name} {median:.2f} (+-{spread / 2:.2f})" for name, (median, spread) in seconds_per_gb().items())
    say(f"cost in seconds per GB on one core: {', '.join(parts)}")


if __name__ == "__main__":
    sys.exit(main())
