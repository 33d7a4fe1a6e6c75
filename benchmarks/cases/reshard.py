"""A checkpoint in storage read at another world size, and on another mesh: bytes and time, next to what DeepSpeed and
torch need for the same."""

from __future__ import annotations

import time
from typing import Any

from benchmarks import crews
from benchmarks.children import Children, NotMeasured
from benchmarks.figures import Figure, Target, not_measured, ratio
from benchmarks.options import Options
from benchmarks.workload import LARGE, SMALL
from elastic.core.checkpoint.snapshots import Copies
from elastic.core.mesh import Mesh, MeshSettings
from elastic.core.sharding.mesh_policy import MeshFacts, choose
from elastic.core.sharding.placement import members_in_order
from elastic.core.sharding.reshard import SourceIndex
from elastic.core.sharding.zero import zero3_layout
from elastic.planner.model_shape import parse_model

CASE = "reshard"
OLD, NEW, STAGE = 4, 3, 1
PLANNED, STAGES = 1024, tuple(range(1, 81))
OWN, DEEPSPEED, DCP = "ray-elastic", "DeepSpeed", "torch DCP"
# From one mesh to another: ranks, and how many of them share each MLP.
MESHES = (((4, 2), (3, 1)), ((4, 2), (2, 2)), ((3, 1), (4, 2)))


def measure(options: Options) -> list[Figure]:
    folder = options.make_folder("reshard")
    size, times = (SMALL if options.quick else LARGE).name, options.pick(5, 2)
    plans = _plans(times)
    own: dict[str, Any] = {"size": size, "stage": STAGE, "folder": str(folder / "own")}
    native: dict[str, Any] = {"size": size, "stage": STAGE, "folder": str(folder / "native")}
    for job in (own, native):
        options.make_folder(f"reshard/{job['folder'].rpartition('/')[2]}")
    with Children(folder) as children:
        try:
            crews.do(children, "own_save", OLD, **own)
            same = crews.do(children, "own_load", OLD, times, **own)
            other = crews.do(children, "own_load", NEW, times, **own)
        except NotMeasured as error:
            return [*plans, not_measured(CASE, "reshard from storage", "s", str(error))]
        figures = _own(size, same, other)
        try:
            crews.do(children, "native_save", OLD, **native)
            plain = crews.do(children, "native_load", OLD, times, **native)
            universal = crews.do(children, "native_load", NEW, times, universal=True, **native)
        except NotMeasured as error:
            figures.append(not_measured(CASE, "load at another world size", "s", str(error), subject=DEEPSPEED))
        else:
            figures += _peer(figures, plain, universal)
    return figures + [figure for mesh in MESHES for figure in _mesh(options, size, times, *mesh)] + plans


def _plans(times: int) -> list[Figure]:
    """What one rank computes before it reads, in a large world."""
    tensors = enumerate(parse_model("llama-3-8b").stage_tensors())
    group = [(f"{number}.{copy}", each.numel) for number, each in tensors for copy in range(each.count)]
    before, after = (zero3_layout([group], ranks) for ranks in (PLANNED, PLANNED - 1))
    indexing, planning = [], []
    for rank in range(times):
        began = time.perf_counter()
        index = SourceIndex(before.ranks)
        indexed = time.perf_counter()
        index.plan(after.ranks[rank], rank)
        indexing.append(indexed - began)
        planning.append(time.perf_counter() - indexed)
    change = f"Llama 3 8B, ZeRO-3, {PLANNED} -> {PLANNED - 1} ranks"
    return [
        Figure(CASE, f"{change}: index of what all ranks hold", "s", tuple(indexing), targets=(Target("median", 0.3),)),
        Figure(CASE, f"{change}: a rank's plan", "s", tuple(planning), targets=(Target("median", 0.15),)),
        _choice(times),
    ]


def _choice(times: int) -> Figure:
    """What the controller computes before a generation begins: two stages before, any of `STAGES` after a loss, and for
    each which worker gets which rank."""
    per, lost = 8, 5
    nodes = {f"n{at}": range(at * per, (at + 1) * per) for at in range(PLANNED // per)}
    settings, before = MeshSettings(pp=STAGES[-1], choices={"pp": STAGES}), Mesh.of(PLANNED, pp=2)
    # Each has a copy of what the node before it has.
    held = ((name, ranks[0], (ranks[0] - per) % PLANNED) for name, ranks in nodes.items() if name != f"n{lost}")
    copies = Copies(PLANNED, tuple((name, ((own, own + per),), ((copy, copy + per),)) for name, own, copy in held))
    slots = [(name, tuple(ranks)) for at, (name, ranks) in enumerate(nodes.items()) if at != lost]
    node_of = {worker: name for name, workers in slots for worker in workers}

    def nodes_of(size: int, mesh: MeshSettings) -> list[str]:
        members = members_in_order(slots, size, copies, mesh.cell, None, before, mesh.mesh(size))
        return [node_of[worker] for worker in members]

    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        choose(MeshFacts(settings, PLANNED - per, 1, 4096, (), {"pp": 2}, before, copies, nodes_of))
        seconds.append(time.perf_counter() - began)
    return Figure(CASE, f"{PLANNED} ranks, a node of {per} lost: one of {len(STAGES)} meshes", "s", tuple(seconds))


def _mesh(options: Options, size: str, times: int, before: tuple[int, int], after: tuple[int, int]) -> list[Figure]:
    """The same state, sharded by FSDP2 on the mesh `before`, read on the one `after`."""
    change, note = f"FSDP2, {before[0]} ranks, tp {before[1]} -> {after[0]}, tp {after[1]}", f"{size} model, page cache"
    place = "reshard/mesh-" + "-".join(map(str, (*before, *after)))
    jobs: list[dict[str, Any]] = [
        {"size": size, "stage": 0, "folder": str(options.make_folder(f"{place}/{who}"))} for who in ("own", "dcp")
    ]
    found: list[Figure] = []
    with Children(options.make_folder(f"{place}/ranks")) as children:
        for job, name, subject in zip(jobs, ("own", "sharded"), (OWN, DCP), strict=True):
            try:
                crews.do(children, f"{name}_save", before[0], tp=before[1], **job)
                told = crews.do(children, f"{name}_load", after[0], times, tp=after[1], **job)
            except NotMeasured as error:
                return [*found, not_measured(CASE, change, "s", str(error), subject=subject)]
            values = _slowest(told) if subject == OWN else _turns(told)
            found.append(Figure(CASE, change, "s", values, subject, notes=(note,)))
    return [*found, ratio(CASE, f"{change}: DCP's load and set_state_dict over our load", found[1], found[0])]


def _own(size: str, same: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[Figure]:
    note = f"{size} model, ZeRO-{STAGE}; the slowest rank reads, installs and verifies; files are in the page cache"
    loads = [load for rank in other for load in rank["loads"]]
    excess = tuple(load["bytes_read"] / load["bytes_needed"] for load in loads)
    at_same = Figure(CASE, f"load at the same world size, {OLD} -> {OLD}", "s", _slowest(same), notes=(note,))
    at_other = Figure(CASE, f"load at another world size, {OLD} -> {NEW}", "s", _slowest(other), notes=(note,),
                      details={"loads": other})  # fmt: skip
    to_same = ratio(CASE, "another world size over the same one", at_other, at_same, Target("median", 1.2))
    return [
        at_same, at_other,
        Figure(CASE, "bytes read over bytes needed", "x", excess, targets=(Target("max", 1.0),)), to_same,
    ]  # fmt: skip


def _slowest(ranks: list[dict[str, Any]]) -> tuple[float, ...]:
    """Repetition by repetition, the time of the rank that took longest."""
    seconds = [[load["read_s"] + load["install_s"] + load["verify_s"] for load in rank["loads"]] for rank in ranks]
    return tuple(max(turn) for turn in zip(*seconds, strict=True))


def _peer(own: list[Figure], plain: list[dict[str, Any]], universal: list[dict[str, Any]]) -> list[Figure]:
    converted_s = max(rank["converted_s"] for rank in universal)
    at_same = Figure(CASE, f"load_checkpoint at the same world size, {OLD} -> {OLD}", "s", _turns(plain), DEEPSPEED)
    notes = (f"converted once, in {converted_s:.2f} s with its defaults",)
    both = tuple(converted_s + seconds for seconds in _turns(universal))
    at_other = Figure(CASE, f"ds_to_universal and load_universal, {OLD} -> {NEW}", "s", both, DEEPSPEED, notes=notes)
    faster = ratio(CASE, "ds_to_universal and load over our load", at_other, own[1], Target("median", 5.0, False))
    to_plain = ratio(CASE, "our load at another world size over DeepSpeed's at the same", own[1], at_same)
    return [at_same, at_other, faster, to_plain]


def _turns(ranks: list[dict[str, Any]]) -> tuple[float, ...]:
    return tuple(max(turn) for turn in zip(*(rank["seconds"] for rank in ranks), strict=True))
