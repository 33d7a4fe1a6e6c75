"""elastic laws: the compute-optimal model for a number of FLOPs, and what it would cost on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from elastic.planner import Planner, PlanningFacts, optimum, refusals, shape_of
from elastic.planner.laws import Optimum
from elastic_jobs.commands.common import positive
from elastic_jobs.commands.planning.plan import cluster_arguments, cluster_of
from elastic_jobs.running.backend import Backend
from elastic_jobs.terminal import put

HELP = "give the compute-optimal model and data for a number of FLOPs, and their cost"
EXAMPLE = "elastic laws --flops 5.76e23 --nodes 64x8xH100"
_SEQUENCE = 4096


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flops", type=float, metavar="C", required=True, help="training FLOPs, such as 5.76e23")
    cluster_arguments(parser, required=False)
    parser.add_argument(
        "--batch-tokens", type=positive, metavar="N", default=4_194_304, help="tokens per step (default 4194304)"
    )


def run(options: argparse.Namespace, backend: Backend) -> int:
    best = optimum(options.flops)
    for line in _lines(best):
        put(line)
    if options.nodes is not None:
        for line in _cost(options, best):
            put(line)
    return 0


def _lines(best: Optimum) -> Iterator[str]:
    yield f"{best.flops:.3g} FLOPs buy most with {_n(best.parameters)} parameters and {_n(best.tokens)} tokens"
    yield f"  {best.tokens / best.parameters:.1f} tokens per parameter, loss {best.loss:.3f} nats per token"
    for name, (low, high) in (
        (f"loss at most {best.tolerance} nats higher", best.flat),
        ("90 % interval of the exponent", best.likely),
    ):
        tokens = f"{_n(best.flops / 6 / high)} to {_n(best.flops / 6 / low)} tokens"
        yield f"  {name}: {_n(low)} to {_n(high)} parameters, {tokens}"
    yield "  constants: Besiroglu et al. 2024 (arXiv 2404.10102); fitted on runs of 0.07 to 16 B parameters"


def _cost(options: argparse.Namespace, best: Optimum) -> Iterator[str]:
    cluster, model = cluster_of(options), shape_of(best.parameters, _SEQUENCE)
    batch = max(1, options.batch_tokens // _SEQUENCE)
    found = Planner().rank(PlanningFacts(model, cluster, batch))
    size = f"{model.layers} layers of {model.hidden}, {_n(model.parameters)} parameters"
    first = found[0]
    if first.time is None:
        kind, (_, example) = next(iter(refusals(found).items()))
        yield f"no plan for {size} on {options.nodes}; {kind}: {example.reason} ({example.mesh})"
        return
    steps = best.tokens / (batch * _SEQUENCE)
    hours = steps * first.time.total_s / 3600
    how = f"{first.mesh}, ZeRO-{first.strategy.zero_stage}, micro-batch {first.strategy.micro_batch}"
    yield f"on {options.nodes}, {size}: {hours * cluster.size:,.0f} GPU-hours, {hours / 24:,.1f} days"
    yield f"  predicted for {how}: {first.time.total_s:.2f} s a step of {batch * _SEQUENCE} tokens; {first.reason}"


def _n(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"
