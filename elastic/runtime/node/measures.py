"""What a node can do, measured in a process of its own: `python -m elastic.runtime.node.measures FOLDER`.

The agent stays as small as it is: no numpy, no threads of a matrix library, and normal priority while it measures.
Prints one JSON object: name -> per second. About half a second of work on one thread of each kind.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable

_SIDE = 512
_COPIED_BYTES = 64 << 20
_WRITTEN_BYTES = 16 << 20
# Best of several: other work on the node only ever makes a measurement slower.
_LEAST, _FOR_S = 3, 0.15


def rates(folder: str) -> dict[str, float]:
    """FLOP/s of single-precision products of 512 x 512 matrices, bytes/s copied in memory, bytes/s written and synced
    in `folder`."""
    return {
        "gemm": 2 * _SIDE**3 / _best_s(_product()),
        "memory": _COPIED_BYTES / _best_s(_copy()),
        "disk": _WRITTEN_BYTES / _best_s(_write(folder)),
    }


def _product() -> Callable[[], object]:
    import numpy

    left = numpy.ones((_SIDE, _SIDE), numpy.float32)
    right, out = left.copy(), left.copy()
    return lambda: numpy.matmul(left, right, out=out)


def _copy() -> Callable[[], object]:
    source, target = memoryview(bytearray(_COPIED_BYTES)), memoryview(bytearray(_COPIED_BYTES))

    def copy() -> None:
        target[:] = source

    return copy


def _write(folder: str) -> Callable[[], object]:
    data = bytes(_WRITTEN_BYTES)

    def write() -> None:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    return write


def _best_s(work: Callable[[], object]) -> float:
    work()
    taken: list[float] = []
    while len(taken) < _LEAST or sum(taken) < _FOR_S:
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


if __name__ == "__main__":
    print(json.dumps(rates(sys.argv[1])))  # noqa: T201
