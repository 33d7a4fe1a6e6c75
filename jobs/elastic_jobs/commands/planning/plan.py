"""elastic plan: which meshes and strategies a cluster allows for a job, predicted without starting anything."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from elastic.core.errors import UsageError
from elastic.core.wording import plural
from elastic.planner import (
    AXES,
    BufferSizes,
    Candidate,
    Cluster,
    Constants,
    MemoryModel,
    Mesh,
    Planner,
    PlanningFacts,
    Strategy,
    parse_cluster,
    parse_model,
    refusals,
)
from elastic_jobs.commands.common import above_zero, history_of, positive, storage_argument
from elastic_jobs.commands.planning.measured_network import measured_network
from elastic_jobs.job_file.load import load_job
from elastic_jobs.job_file.spec import JobSpec
from elastic_jobs.running.backend import Backend
from elastic_jobs.terminal import put, put_json, say

HELP = "predict memory and step time of a job on a cluster, and rank what fits"
EXAMPLE = "elastic plan examples/gpt.yaml --nodes 8x8xH100 --model llama-3-8b --global-batch 512"
_GIB = 2**30
_ROW = "{:>3}  {:<16} {:>4} {:>5}  {:<9} {:<10} {:>7} {:>9} {:>10} {:>5} {:>5} {:>6}"
_HEAD = ("", "mesh", "ZeRO", "micro", "recompute", "offload", "GiB", "step s", "tokens/s", "peak", "comm", "bubble")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB.yaml", help="the job file")
    cluster_arguments(parser, required=True)
    parser.add_argument(
        "--model", metavar="M", help="a known model (llama-3-8b) or its sizes (layers=24,hidden=1024,...)"
    )
    parser.add_argument("--global-batch", type=positive, metavar="N", help="samples per step (default: the job's)")
    parser.add_argument("--axes", metavar="A,B", default=",".join(AXES), help=f"axes to use (default {','.join(AXES)})")
    parser.add_argument(
        "--from", dest="measured_in", metavar="RUN", help="take the network that this run's nodes have measured"
    )
    storage_argument(parser)
    parser.add_argument("--spare", type=positive, metavar="N", help="ranks that may stay idle (default: none)")
    parser.add_argument("--top", type=positive, metavar="N", default=10, help="rows to print (default 10)")
    parser.add_argument("--json", action="store_true", help="one JSON object per candidate, refused ones included")


def cluster_arguments(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--nodes", metavar="NxDxKIND", required=required, help="nodes x devices per node x device, such as 8x8xH100"
    )
    parser.add_argument(
        "--network", type=above_zero, metavar="GBPS", help="gigabits per second of a node (default: usual)"
    )
    parser.add_argument(
        "--host-memory", type=above_zero, metavar="GIB", help="host memory of a node; it limits offload"
    )


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Raises UsageError naming the known devices."""
    return replace(
        parse_cluster(options.nodes),
        node_bytes_per_s=(options.network or 0.0) * 1e9 / 8,
        host_memory_bytes=int((options.host_memory or 0.0) * _GIB),
    )


def run(options: argparse.Namespace, backend: Backend) -> int:
    spec = load_job(options.job)
    deepspeed = spec.deepspeed if isinstance(spec.deepspeed, dict) else {}
    facts, zero = _facts(options, spec, deepspeed), _section(deepspeed, "zero_optimization")
    planner = Planner(MemoryModel(buffers=BufferSizes.from_deepspeed(zero)))
    found = planner.rank(facts)
    if options.json:
        for one in found:
            put_json(_record(one))
        return 0
    if not any(_section(deepspeed, name).get("enabled") for name in ("bf16", "fp16")):
        say("the job's DeepSpeed configuration enables neither bf16 nor fp16; the plan is for bf16")
    for line in table(facts, found, options.top):
        put(line)
    as_it_is = Strategy(zero.get("stage", 0), facts.global_batch, _micro_batch(spec, deepspeed))
    own = planner.evaluate(facts, Mesh(dp=facts.cluster.size), as_it_is)
    put("\nThe job as it is:")
    put(_row("", facts, own) if own.time else f"  {own.mesh} ZeRO-{as_it_is.zero_stage}: {own.reason}")
    return 0


def _facts(options: argparse.Namespace, spec: JobSpec, deepspeed: Mapping[str, Any]) -> PlanningFacts:
    if options.model is None:
        raise UsageError(
            f"{options.job} does not say how large the model is; give --model NAME (such as llama-3-8b) or "
            "--model layers=24,hidden=1024,heads=16,vocabulary=50257,sequence=1024"
        )
    batch = options.global_batch or spec.global_batch or deepspeed.get("train_batch_size")
    if not isinstance(batch, int):
        raise UsageError(f"{options.job} does not say the global batch; give --global-batch N")
    axes = tuple(axis.strip() for axis in options.axes.split(","))
    return PlanningFacts(parse_model(options.model), _cluster(options), batch, axes, spare_ranks=options.spare or 0)


def _cluster(options: argparse.Namespace) -> Cluster:
    """With the network that a run has measured, where one is named."""
    cluster = cluster_of(options)
    if options.measured_in is None:
        return cluster
    if options.network is not None:
        raise UsageError("--network and --from both say what the network is; give one of them")
    options.run = options.measured_in
    folder, records = history_of(options)
    kind, count, link = measured_network(records, folder.run_id)
    rate = 1 / link.beta_s_per_byte
    say(
        f"network of run {folder.run_id}: {plural(count, 'connection')} ({kind}), {1e6 * link.alpha_s:.3g} us and "
        f"{rate / 1e9:.3g} GB/s over TCP, knee {link.knee:.2g}; a network that NCCL uses otherwise may be faster"
    )
    # The model takes the network's rate for more than collectives reach of it.
    return replace(cluster, node_bytes_per_s=rate / Constants().node_fraction)


def _section(deepspeed: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = deepspeed.get(name) or {}
    if not isinstance(found, Mapping):
        raise UsageError(f"deepspeed: {name} must be a mapping, not {found!r}")
    return found


def _micro_batch(spec: JobSpec, deepspeed: Mapping[str, Any]) -> int:
    found = spec.micro_batch or deepspeed.get("train_micro_batch_size_per_gpu")
    return found if isinstance(found, int) and found > 0 else 1


def table(facts: PlanningFacts, found: Sequence[Candidate], top: int) -> Iterator[str]:
    """The fastest candidates, the parts of the first, and why the others are refused."""
    can = [one for one in found if not one.refusal]
    billions = facts.model.parameters / 1e9
    where = f"{facts.cluster.nodes} nodes of {facts.cluster.per_node} {facts.cluster.device.name}"
    batch = f"{facts.global_batch} samples of {facts.model.sequence} tokens a step"
    yield f"{billions:.2f} B parameters on {where}, {batch}"
    yield f"{len(can)} of {len(found)} candidates can run\n"
    if can:
        yield _ROW.format(*_HEAD)
        yield from (_row(str(i + 1), facts, one) for i, one in enumerate(can[:top]))
        yield from _parts(can[0])
    if len(can) < len(found):
        yield "\nRefused:"
        for kind, (count, first) in refusals(found).items():
            yield f"{count:>5}  {kind}: {first.reason} ({first.mesh})"


def _row(number: str, facts: PlanningFacts, one: Candidate) -> str:
    assert one.time is not None
    assert one.memory is not None
    seconds, strategy = one.time.total_s, one.strategy
    return _ROW.format(
        number,
        str(one.mesh),
        strategy.zero_stage,
        strategy.micro_batch,
        strategy.recompute,
        strategy.offload,
        f"{one.memory.total / _GIB:.1f}",
        f"{seconds:.3f}",
        f"{facts.global_batch * facts.model.sequence / seconds:.0f}",
        f"{one.utilisation:.0%}",
        f"{one.time.exposed_s / seconds:.0%}",
        f"{one.time.bubble_s / seconds:.0%}",
    )


def _parts(one: Candidate) -> Iterator[str]:
    assert one.time is not None
    assert one.memory is not None
    memory = {name: size for name, size in asdict(one.memory).items() if size and name != "pipeline_stage"}
    time = one.time
    yield "\nMemory of the fullest rank of 1, GiB: " + ", ".join(f"{k} {v / _GIB:.2f}" for k, v in memory.items())
    seconds = {
        "compute": time.compute_s,
        **{f"{row.operation} over {row.axis}": row.exposed_s for row in time.collectives},
        "bubble": time.bubble_s,
        "optimizer": time.optimizer_s,
        "offload": time.offload_s,
        "fixed": time.fixed_s,
    }
    shown = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items() if value)
    yield f"Step of 1, seconds that nothing hides: {shown}"


def _record(one: Candidate) -> dict[str, Any]:
    return asdict(one) | {
        "memory_total_bytes": one.memory.total if one.memory else None,
        "step_s": one.time.total_s if one.time else None,
    }
