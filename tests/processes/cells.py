"""Runs whose ranks share the work of a cell, through other world sizes and a lost rank, and what is compared then."""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import crew as members
import torch
from crew import Crew, Outcome
from layered_model import SHARES
from test_oracle import _assert_ended, state_of

import elastic
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.checkpoint.lanes import lane_of
from elastic.core.generation_spec import BatchSettings

# Two epochs of 37 samples in steps of ten: a step reaches over the epoch's end, and the last one is short.
BATCH, LAST_STEP, SIZE = BatchSettings(epochs=2), 8, 37
# The step in which a rank is lost.
AT = 4
# Members of one generation, its last step (None: the end), and maybe fields of GenerationSpec that it alone has.
Part = tuple[Sequence[int], int | None] | tuple[Sequence[int], int | None, Mapping[str, Any]]
MOVED: Sequence[Part] = (((0, 1, 2, 3), 3), ((2, 0), 5), ((1, 3, 0, 2), None))
WHOLE: Sequence[Part] = (((0,), None),)


def offloaded(*stages: int) -> list[dict[str, Any]]:
    """DeepSpeed with what the stage keeps in host memory, and torch's optimizer."""
    host, own = {"device": "cpu"}, {"zero_force_ds_cpu_optimizer": False}
    both = {"offload_optimizer": host, "offload_param": host}
    return [
        {"stage": stage, "zero": both if stage == 3 else {"offload_optimizer": host}, "top": own} for stage in stages
    ]


# In the schedule of MOVED two stand by from step 3 to step 5, and the first epoch ends within step 4.
STOOD_BY = "left: it has stood by while the others came to the end of an epoch"


def left(crew: Crew) -> set[str]:
    """Why functions of those that are there have left their loop."""
    return {point for member in crew.members for point in member.points if point.startswith("left")}


class Run:
    """What is compared: the newest checkpoint, with slices put together, and the loss of every step. `shares`: of
    matrices of several projections, each of which the ranks share by itself."""

    def __init__(
        self,
        url: Path,
        generations: Sequence[Sequence[Outcome]],
        tp: int = 1,
        shares: Mapping[str, Sequence[int]] = SHARES,
    ) -> None:
        self.shares = shares
        store = CheckpointStore(str(url), "run")
        manifest = store.manifest(store.list()[0].id)
        assert manifest.tp == tp
        views = [lane_of(manifest, lane) for lane in range(tp)]
        self.shapes = [view.parameters for view in views]
        self.lanes = [state_of(store, view) for view in views]
        self.outcomes = [outcome for generation in generations for outcome in generation]
        losses: Counter[str] = Counter()
        for outcome in self.outcomes:
            for report in outcome.reports:
                losses[f"loss {report.step}"] += report.loss
        self.losses = {name: torch.tensor(loss) for name, loss in losses.items()}

    def after(self, step: int) -> dict[str, torch.Tensor]:
        """The losses of later steps: what a killed rank has reported of earlier ones went with it."""
        return {name: loss for name, loss in self.losses.items() if int(name.removeprefix("loss ")) > step}

    def state(self, shapes: Mapping[str, Sequence[int]] | None = None) -> dict[str, torch.Tensor]:
        """The tensors of the whole model, whose shapes these are; None: the ranks had them whole."""
        shapes = shapes or self.shapes[0]
        found = {}
        for key in self.lanes[0]:
            name = key.split("/", 1)[1]
            parts = [lane[key].view(own[name]) for lane, own in zip(self.lanes, self.shapes, strict=True)]
            found[key] = _together(name, parts, tuple(shapes[name]), self.shares).flatten()
        return found


def assert_within_rounding(exact: Run, still: Run, moved: Run) -> None:
    """`still` and `moved` in bf16, and one rank's runs are `still` and `exact`, which is not rounded. In each kind of
    figure each of the two is about as far from what is exact as one rank's rounding is, and so twice that from the
    other; half as much is left for order of addition."""
    for rounded, apart in zip(_apart(exact, still), _apart(still, moved), strict=True):
        assert 0 < apart <= 3 * rounded, (_apart(exact, still), _apart(still, moved))


def _apart(one: Run, other: Run) -> list[float]:
    """The largest difference of a loss, and in parts of the former that of a gradient's norm, and of the weights and
    first moments of experts and of all else."""
    norms = [{r.step: r.grad_norm for outcome in run.outcomes for r in outcome.reports} for run in (one, other)]
    here, there = one.state(), other.state(one.shapes[0])
    kinds: dict[tuple[str, bool], list[str]] = {}
    for name in here:
        kinds.setdefault((name.split("/")[0], ".experts." in name), []).append(name)
    apart = []
    for names in (names for (kind, _), names in kinds.items() if kind in ("master", "exp_avg")):
        mine, others = (torch.cat([state[name] for name in names]) for state in (here, there))
        apart.append(float((mine - others).norm() / mine.norm()))
    return [
        max(abs(float(loss - other.losses[step])) for step, loss in one.losses.items()),
        max(abs(norms[1][step] / norm - 1) for step, norm in norms[0].items()),
        *apart,
    ]


def _together(
    name: str, parts: Sequence[torch.Tensor], shape: tuple[int, ...], of_layers: Mapping[str, Sequence[int]]
) -> torch.Tensor:
    if parts[0].shape == shape:
        assert all(torch.equal(part, parts[0]) for part in parts), "what each rank has whole is the same on all"
        return parts[0]
    (dim,) = [dim for dim, size in enumerate(shape) if parts[0].shape[dim] != size]
    # A rank has its share of each projection that the matrix holds.
    shares = next((found for layer, found in of_layers.items() if f".{layer}." in name), (1,))
    own = [part.split([part.shape[dim] * share // sum(shares) for share in shares], dim) for part in parts]
    joined = torch.cat([part for projection in zip(*own, strict=True) for part in projection], dim)
    assert joined.shape == shape
    return joined


def through(
    crew: Crew, url: Path, function: str, config: Mapping[str, Any], parts: Sequence[Part], **spec: Any
) -> list[list[Outcome]]:
    """A run in these generations; `spec` are fields of GenerationSpec."""
    store, generations, checkpoint = CheckpointStore(str(url), "run"), [], None
    for who, end_at, *other in parts:
        more = {**of_run(config), **spec, **(other[0] if other else {})}
        outcomes = crew.run(who, function, {**config, "url": str(url)}, end_at=end_at, checkpoint=checkpoint, **more)
        _assert_ended(outcomes, "finished" if end_at is None else "ended", end_at or LAST_STEP)
        assert all(outcome.clean for outcome in outcomes)
        checkpoint = store.list()[0].id
        generations.append(outcomes)
    return generations


def of_run(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"batch": BATCH, "max_world_size": 4, "engine": str(config.get("engine", "deepspeed"))}


def with_a_rank_killed(
    crew: Crew,
    url: Path,
    function: str,
    config: Mapping[str, Any],
    where: str,
    of_two: Mapping[str, Any] | None = None,
    then: Sequence[int] = (3, 0),
    **spec: Any,
) -> list[list[Outcome]]:
    """The ranks of the crew, mostly in two cells, of which one is killed in step `AT`. The survivors `then`, mostly a
    cell, go on; then there are all again. All survivors stay in their loop. `of_two`: fields of GenerationSpec that
    those have alone."""
    more = {**of_run(config), "checkpoint_every_steps": 1, **spec}
    config = {**config, "in_loop": True, "url": str(url)}
    lose_a_rank(crew, url, function, config, where, **more)
    store = CheckpointStore(str(url), "run")
    fewer = {**more, **(of_two or {})}
    shrunk = crew.run(then, function, config, checkpoint=store.list()[0].id, end_at=AT + 2, **fewer)
    _assert_ended(shrunk, "ended", AT + 2)
    everyone = range(len(crew.members))
    grown = crew.run(everyone, function, config, checkpoint=store.list()[0].id, **more)
    _assert_ended(grown, "finished", LAST_STEP)
    left = [point for member in crew.members for point in member.points if point.startswith("left")]
    assert left == [], "a function was left"
    for rank in (rank for rank in everyone if rank != 1):
        assert (grown[rank].told["calls"], grown[rank].told["abandoned"]) == (1, 1)
    return [shrunk, grown]


def lose_a_rank(crew: Crew, url: Path, function: str, config: Mapping[str, Any], where: str, **more: Any) -> None:
    """The ranks of the crew, of which the second is killed in step `AT`; in its place there is a fresh process
    afterwards."""
    survivors = kill_a_rank(crew, function, config, where, **more)
    for number in survivors:
        crew.abort(number, "rank 1 was lost")
    for number in survivors:
        assert crew.outcome(number).result.kind in ("ended", "collective_failed")
    crew.replace(1)
    assert CheckpointStore(str(url), "run").list()[0].step == AT


def kill_a_rank(crew: Crew, function: str, config: Mapping[str, Any], where: str, **more: Any) -> list[int]:
    """The others, which nobody has told of it."""
    everyone = range(len(crew.members))
    config = {**config, "victims": [1], "at": AT, "where": where, "ranks": len(everyone)}
    crew.begin(everyone, function, config, **more)
    for number in everyone:
        crew.reached(number, "there")
    crew.reached(0, f"committed step {AT}")
    crew.members[1].signal(signal.SIGKILL)
    crew.members[1].process.join()
    return [number for number in everyone if number != 1]


def assert_every_sample_once(run: Run) -> None:
    positions = Counter(
        position
        for outcome in run.outcomes
        for report in outcome.reports
        for start, stop in report.positions
        for position in range(start, stop)
    )
    assert positions == dict.fromkeys(range(2 * SIZE), 1)
    assert all(math.isfinite(loss) for loss in run.losses.values())


def assert_means(outcome: Outcome, one: Run, allowed: float = 1e-5) -> None:
    """What a rank's function has seen of the losses are those of the global batch, up to the last step."""
    steps: Mapping[int, float] = outcome.told["steps"]
    assert max(steps) == LAST_STEP
    for step, loss in steps.items():
        assert abs(loss - float(one.losses[f"loss {step}"])) <= allowed, step


# -- in the member's process -------------------------------------------------------------------------------------


def come_to(config: Mapping[str, Any], where: str, last: bool) -> None:
    """Of the last micro-batch of step `config["at"]` in a world of all: all ranks tell that they are at
    `config["where"]`, and those in `config["victims"]` stay there, for ever."""
    context = elastic.get_context()
    here = config.get("at") == context.step and context.world_size == config.get("ranks", 4)
    if last and here and config["where"] == where:
        members.point("there")
        if context.rank in config["victims"]:
            members.stay()


def step_of(config: Mapping[str, Any]) -> AbstractContextManager[None]:
    return elastic.step() if config.get("strict") else nullcontext()


def begun() -> None:
    members.told["calls"] = members.told.get("calls", 0) + 1


def told(**more: Any) -> None:
    context = elastic.get_context()
    members.told.update(
        starts=elastic.state["starts"], mesh=dict(context.mesh), coordinates=dict(context.coordinates), **more
    )
