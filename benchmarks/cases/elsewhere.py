"""What a snapshot at every step costs where the training leaves the processors alone, as it does on accelerators."""

from __future__ import annotations

from benchmarks.cases.steady import FORCED, PLAIN, Mode, measure_mode
from benchmarks.figures import Figure
from benchmarks.options import Options
from benchmarks.workload import LARGE_LIGHT


def measure(options: Options) -> list[Figure]:
    return measure_mode(options, Mode("elsewhere", LARGE_LIGHT, 1.0, (PLAIN, FORCED), rounds=18))
