"""Runs on a real local cluster, steered from a test: every wait is for a journal record or a state, with a limit."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import loops
import pytest
import ray
from elastic_cluster import LocalCluster, NodeInfo, NodeState
from elastic_cluster.local import processes
from elastic_cluster.local.node_table import TAG
from ray.util.placement_group import PlacementGroup

from elastic.core.checkpoint.snapshots import Held, one_by_one
from elastic.core.errors import RunNotFound
from elastic.core.event_groups import apart
from elastic.core.events import from_json
from elastic.core.settings import (
    AnomalySettings,
    AuditSettings,
    CheckpointSettings,
    CommunicationSettings,
    FailureSettings,
    RunSettings,
    ScalingSettings,
    SnapshotSettings,
    StragglerSettings,
)
from elastic.observe.journal import JournalReader
from elastic.observe.summary import summarize
from elastic.runtime import names
from elastic.runtime.driver import client
from elastic.runtime.train_function import Entry

# Only a hang takes as long. On two busy cores the imports of four workers were seen to take 140 s.
LIMIT_S = 400.0
# More than a new worker takes to come where nothing else is running.
_BRISK_STEPS = 40
# Actors whose process is still being set up are titled by Ray as idle: their names are in the list of actors.
_ACTORS = ("ray::ControllerActor", "ray::WorkerActor", "ray::AgentActor", "ray::SupervisorActor")
# Started by an agent, with which it ends.
_FORK_SERVER = "/elastic/runtime/worker/fork_main.py"
HERE = Path(__file__).resolve().parent
# Where the three packages are: child processes find these, whatever is installed.
PACKAGES = os.pathsep.join(str(HERE.parents[1] / folder) for folder in ("", "jobs", "cluster"))

# Of a cluster whose workers are forks, see forking_node.
FORKING = {"ELASTIC_CLUSTER_NODE_INIT": str(HERE / "forking_node.py")}

Record = Mapping[str, Any]


def wait_until(condition: Callable[[], Any], awaited: str, limit_s: float = LIMIT_S) -> Any:
    """The first value of `condition()` that is true."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {limit_s:g} s for {awaited}"
        time.sleep(0.02)
    return value


def start_run(settings: RunSettings, entry: str, config: Mapping[str, Any] | None, address: str) -> client.RayRunHandle:
    """`entry` is looked for in this folder."""
    client.connect(address)
    return client.start(settings, Entry.named(entry, config, str(HERE)))


class Place(Protocol):
    """The part of a cluster that a run needs: where Ray answers, and which nodes there are."""

    @property
    def address(self) -> str: ...

    def nodes(self) -> tuple[NodeInfo, ...]: ...


class Handle(Protocol):
    """The part of `elastic.runtime.driver.client.RayRunHandle` that is used here."""

    def progress(self) -> Mapping[str, Any]: ...

    def wait_step(self, step: int, timeout_s: float) -> bool: ...

    def result(self, timeout_s: float) -> Mapping[str, Any] | None: ...

    def stop(self, reason: str) -> None: ...

    def leave(self) -> None: ...


class Run:
    """One run of `loops` on `cluster`, its files below `folder`. Training stops where `allow` says.

    Without `memory` there are no snapshots, and storage is what everything is recovered from. `checkpoints` are kept
    next to the journal, unless another URL is given.
    """

    handle: Handle

    def __init__(
        self,
        cluster: Place,
        folder: Path,
        entry: str = "loops:train",
        *,
        run_id: str = "run",
        config: Mapping[str, Any] | None = None,
        scaling: ScalingSettings | None = None,
        failures: Mapping[str, Any] | None = None,
        every_steps: int | None = 5,
        keep_last: int = 2,
        checkpoints: str | None = None,
        epochs: int | None = 2,
        global_batch: int | None = None,
        resources: Mapping[str, float] | None = None,
        memory: Mapping[str, Any] | None = None,
        anomalies: Mapping[str, Any] | None = None,
        stragglers: Mapping[str, Any] | None = None,
        audit: Mapping[str, Any] | None = None,
        communication: CommunicationSettings | None = None,
        seed: int = 0,
    ) -> None:
        self.cluster, self.folder = cluster, folder
        self.url = str(folder / "runs")
        self.config = {"size": 127, "batch": 10, "folder": str(folder), **(config or {})}
        self.entry = entry
        self.settings = RunSettings(
            run_id=run_id,
            seed=seed,
            scaling=scaling or ScalingSettings(2, 4),
            epochs=epochs,
            engine=(config or {}).get("engine", "deepspeed"),
            global_batch=global_batch,
            checkpoint=CheckpointSettings(checkpoints or self.url, every_steps, keep_last),
            snapshots=SnapshotSettings(enabled=memory is not None, **(memory or {})),
            anomalies=AnomalySettings(**(anomalies or {})),
            # Where many processes share few cores, any of them may be slow for a while.
            stragglers=StragglerSettings(**(stragglers or {"policy": "off"})),
            audit=AuditSettings(**(audit or {})),
            communication=communication,
            # A gate that stays shut for long is no hang.
            failures=FailureSettings(**{"hang_floor_s": 300.0, **(failures or {})}),
            resources_per_worker=resources or {"CPU": 1.0},
            storage_url=self.url,
        )

    def start(self) -> Run:
        """Also a run that was started before: it continues from its newest checkpoint."""
        self.handle = start_run(self.settings, self.entry, self.config, self.cluster.address)
        return self

    # --- steering ---

    def allow(self, step: int) -> None:
        """Training may continue until `step` is finished."""
        self.waiting_at = step
        loops.allow(self.folder, step)

    def reach(self, step: int) -> None:
        """Wait until every rank has finished `step`."""
        assert self.handle.wait_step(step, LIMIT_S), f"step {step} was not reached; {self.told()}"

    def node_of(self, rank: int) -> Any:
        place = self.worker(rank)["node"]
        return next(node for node in self.cluster.nodes() if node.node_id == place)

    def worker(self, rank: int) -> Record:
        """Where a rank of the running generation is."""

        def look() -> Record | None:
            return next((w for w in self.handle.progress()["workers"] if w["rank"] == rank), None)

        found: Record = wait_until(look, f"rank {rank} to be there")
        return found

    def away_from_head(self) -> list[int]:
        """Ranks whose nodes may be struck: the controller is on the head."""
        head = next(node.node_id for node in self.cluster.nodes() if node.head)
        workers = self.handle.progress()["workers"]
        return sorted(w["rank"] for w in workers if w["rank"] is not None and w["node"] != head)

    def finish(self, status: str = "finished") -> Record:
        """Let training go, wait for the end, and see that nothing of the run is left in the cluster."""
        self.allow(1 << 30)
        return self.ended(status)

    def ended(self, status: str) -> Record:
        result = self.handle.result(LIMIT_S)
        assert result is not None, f"the run does not end; {self.told()}"
        assert result["status"] == status, f"{result}; {self.told()}"
        self.handle.leave()
        wait_until(lambda: not self.left(), "the run to be gone from the cluster")
        return result

    def left(self) -> list[str]:
        """Named actors and placement groups of this run."""
        return left_of_run(self.settings.run_id)

    # --- the journal ---

    def records(self, kind: str | None = None) -> list[Record]:
        try:
            found = JournalReader(self.url, self.settings.run_id).records()
        except RunNotFound:
            return []
        return [record for record in found if kind is None or record["type"] == kind]

    def events(self, name: str) -> list[Record]:
        return [record for record in self.records("event") if record["event"] == name]

    def decisions(self, kind: str | None = None) -> list[str]:
        return [r["sentence"] for r in self.records("decision") if kind is None or r["kind"] == kind]

    def wait_for(self, awaited: str, condition: Callable[[list[Record]], Any]) -> Any:
        """Until the journal fulfils the condition."""
        deadline = time.monotonic() + LIMIT_S
        while not (value := condition(self.records())):
            assert time.monotonic() < deadline, f"waited {LIMIT_S:g} s for {awaited}; {self.told()}"
            time.sleep(0.05)
        return value

    def wait_checkpoint(self, step: int) -> None:
        def committed(records: list[Record]) -> bool:
            return any(r["type"] == "checkpoint" and r["step"] == step for r in records)

        self.wait_for(f"the checkpoint of step {step}", committed)

    def wait_snapshot(self, step: int) -> None:
        """Wait until every node's memory has all that it is to hold of step `step`, replicas included."""

        def whole() -> bool:
            copies = [held for node in self.memory() for held in node if held.step == step]
            ranks = {held.rank for held in copies}
            size = next((held.world_size for held in copies), -1)
            wanted = size * (1 + min(self.settings.snapshots.replicas, size - 1))
            return len(ranks) == size and len(copies) == wanted

        wait_until(whole, f"the snapshot of step {step} to be complete")

    def memory(self) -> list[tuple[Held, ...]]:
        """What the memory of each node of the run holds, as its agent tells."""
        prefix = names.parts(self.settings.run_id)
        agents = [
            ray.get_actor(entry["name"], entry["namespace"])
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if entry["name"].startswith(prefix) and ":agent:" in entry["name"]
        ]
        answers = []
        for agent in agents:
            with contextlib.suppress(ray.exceptions.RayError):
                answers.append(one_by_one(ray.get(agent.memory_held.remote(), timeout=LIMIT_S)))
        return answers

    def promises(self, records: list[Record]) -> set[tuple[int, int]]:
        """(generation, worker) of each promise where to stop."""
        told = (r for r in records if r["type"] == "event" and "StopPromised" in (r["event"], r.get("report")))
        return {(event.generation, event.worker) for record in told for event in apart(from_json(record))}

    def wait_promises(self, enough: Callable[[int], bool] = lambda _: False) -> int:
        """Wait until every rank of the running generation has promised where to stop; returns the generation, which is
        the next one where a stall of the machine has ended the one that ran, and -1 where `enough` ranks run."""

        def promised(records: list[Record]) -> int:
            now = self.handle.progress()
            number, size = now["generation"], now["world_size"]
            if enough(size):
                return -1
            ranks = {worker for generation, worker in self.promises(records) if generation == number}
            return number if size and len(ranks) == size else 0

        number: int = self.wait_for("the running generation to end as planned", promised)
        return number

    def grow_to(self, world_size: int) -> None:
        """All ranks wait where they may not continue: let each planned end through until as many train."""
        self._resize(lambda now: now >= world_size)

    def shrink_to(self, world_size: int) -> None:
        self._resize(lambda now: now <= world_size)

    def _resize(self, done: Callable[[int], bool]) -> None:
        # Before the run's first generation the world size is 0, and it may begin with as many as are waited for.
        while (number := self.wait_promises(done)) != -1:
            # A generation that begins where they may not continue does its first step all the same.
            self.allow(max(self.waiting_at, self.handle.progress()["step"]) + 1)
            self.wait_generation(number + 1)

    def walk_until(self, condition: Callable[[], Any], awaited: str) -> None:
        """Let training continue, two steps a second at first and one a second later, so that the run is neither over
        nor at a standstill meanwhile, and has not many steps left when it may go."""
        paces = itertools.chain([0.5] * _BRISK_STEPS, itertools.repeat(1.0))

        def one_step() -> Any:
            self.allow(self.waiting_at + 1)
            assert self.handle.result(next(paces)) is None, f"the run was over before {awaited}; {self.told()}"
            return condition()

        wait_until(one_step, awaited)

    def wait_generation(self, number: int) -> Record:
        """Until generation `number` has done its first step."""

        def first_step(records: list[Record]) -> Record | None:
            done = (r for r in records if r["type"] == "event" and r["event"] == "FirstStepDone")
            return next((r for r in done if r["generation"] == number), None)

        found: Record = self.wait_for(f"the first step of generation {number}", first_step)
        return found

    def incidents(self) -> list[Record]:
        """In order; an incident that is written again is written whole, and each attempt numbers its own."""
        attempt, found = 0, {}
        for record in self.records():
            attempt += record["type"] == "run" and record["status"] == "running"
            if record["type"] == "incident":
                found[attempt, record["id"]] = record
        return list(found.values())

    def summary(self) -> dict[str, Any]:
        return summarize(self.records())

    def meshes(self) -> dict[int, Mapping[str, int]]:
        """Of a run whose mesh may change: by generation the axes that it has had."""
        told = [r for r in self.records("decision") if r["kind"] == "mesh" and r["sentence"].startswith("generation ")]
        return {
            int(note["sentence"].split()[1]): next(row["axes"] for row in note["data"]["meshes"] if row["chosen"])
            for note in told
        }

    def steps(self) -> dict[int, Record]:
        """The final timeline: of a step that was done twice, the last."""
        return {step["step"]: step for record in self.records("steps") for step in record["steps"]}

    def losses(self) -> dict[int, float]:
        return {number: step["loss"] for number, step in sorted(self.steps().items())}

    def told(self) -> str:
        return "the run has said:\n" + "\n".join(self.decisions()[-25:])

    # --- what must hold of every run that has finished ---

    def assert_whole(self) -> None:
        self.assert_samples_once()
        self.assert_time_is_accounted_for()
        self.assert_generations_are_told()

    def assert_samples_once(self) -> None:
        """By the run's own ledger, and by what the datasets of its workers were asked for."""
        total, batch, epochs = self.config["size"], self.config["batch"], self.settings.epochs or 1
        ledger = self.records("samples")[-1]
        assert {key: ledger[key] for key in ("seen", "missing", "repeated")} == {
            "seen": total * epochs,
            "missing": 0,
            "repeated": 0,
        }
        sizes = {told["number"]: told["world_size"] for told in self.summary()["generations"]}
        given = given_samples(self.folder)
        last_step = -(-total * epochs // batch)
        assert sorted(given) == list(range(1, last_step + 1))
        counted: Counter[int] = Counter()
        meshes = self.meshes()
        for step, by_generation in given.items():
            # The newest generation that did a step is the one whose step was not rolled back.
            generation = max(by_generation)
            by_rank = by_generation[generation]
            assert sorted(by_rank) == list(range(sizes[generation])), f"step {step} of generation {generation}"
            mesh = self.settings.mesh.shape(meshes.get(generation, {}))
            # Every rank that shares sequences, or layers, reads the samples of all; of stages the first and the last.
            copies = mesh.readers // mesh.pp * min(mesh.pp, 2)
            own = Counter(index for indices in by_rank.values() for index in indices)
            assert all(count % copies == 0 for count in own.values()), f"step {step} of generation {generation}"
            counted.update({index: count // copies for index, count in own.items()})
        odd = dict(counted.items() ^ dict.fromkeys(range(total), epochs).items())
        assert not odd, f"not given once in each of {epochs} epochs: {odd}; of steps: {given}"

    def assert_time_is_accounted_for(self) -> None:
        """The ledger's owners sum to the time from the controller's first record to the ledger itself."""
        records = self.records()
        begun = next(i for i, r in enumerate(records) if r["type"] == "run" and r["status"] == "running")
        ledger = self.records("ledger")[-1]
        wall_s = ledger["time"] - records[begun]["time"]
        # The two ends are read from the clock at two places each.
        assert sum(ledger["seconds"].values()) == pytest.approx(wall_s, abs=1.0)
        assert min(ledger["seconds"].values()) >= 0.0
        # Some accelerators are held in whatever time is productive, and never more than the run may have.
        scaling = self.settings.scaling
        most = scaling.max_slots * scaling.workers_per_slot
        for owner, seconds in ledger["seconds"].items():
            assert 0.0 <= ledger["held_s"].get(owner, 0.0) <= most * seconds + 1e-6, owner
        if "productive" in ledger["seconds"]:
            assert ledger["held_s"]["productive"] >= ledger["seconds"]["productive"]

    def assert_generations_are_told(self) -> None:
        """Numbers grow by one, worlds are complete, and each begins where its checkpoint was."""
        told = self.summary()["generations"]
        assert [generation["number"] for generation in told] == list(range(1, len(told) + 1))
        for generation in told:
            assert None not in generation.values(), generation
        for earlier, later in pairwise(told):
            assert 1 <= later["first_step"] <= earlier["last_step"] + 1
        assert told[-1]["last_step"] == max(self.steps())


def four_three_two_four(run: Run) -> list[str]:
    """A run of more than 20 steps: two nodes are killed, two are added. Returns Ray's ids of those that were lost."""
    run.allow(7)
    run.start()
    run.reach(7)
    if run.settings.snapshots.enabled:
        run.wait_snapshot(7)
    else:
        run.wait_checkpoint(5)
    # All ranks are in the user's own code: nothing fails by itself, the loss has to be noticed.
    first = run.node_of(run.away_from_head()[-1])
    run.cluster.kill_node(first.name)
    run.wait_generation(2)
    assert run.handle.progress()["world_size"] == 3
    second = run.node_of(run.away_from_head()[0])
    run.allow(20)
    run.reach(9)
    # All ranks are training: the others are somewhere in a step.
    run.cluster.kill_node(second.name)
    run.wait_generation(3)
    assert run.handle.progress()["world_size"] == 2
    run.reach(20)
    run.cluster.add_node()
    run.cluster.add_node()
    run.grow_to(4)
    run.finish()
    return [first.node_id, second.node_id]


def given_samples(folder: Path) -> dict[int, dict[int, dict[int, list[int]]]]:
    """step -> generation -> rank -> dataset indices, as the workers' datasets were asked for them."""
    found: dict[int, dict[int, dict[int, list[int]]]] = {}
    for path in folder.glob("given-*.json"):
        generation, rank, step = map(int, path.stem.split("-")[1:])
        found.setdefault(step, {}).setdefault(generation, {})[rank] = json.loads(path.read_text())
    return found


# -- the cluster -------------------------------------------------------------------------------------------------------


def module_cluster(nodes: int, **options: Any) -> Iterator[LocalCluster]:
    """A cluster with this process in it, of which nothing is left in the end."""
    for cluster in own_cluster(nodes, **options):
        yield from joined(cluster)


def own_cluster(nodes: int, **options: Any) -> Iterator[LocalCluster]:
    """A cluster of which nothing is left in the end."""
    with LocalCluster.start(nodes, **options) as cluster:
        footprint = Footprint(cluster)
        yield cluster
        footprint.look()
    assert footprint.left() == []


def joined(cluster: LocalCluster) -> Iterator[LocalCluster]:
    """With this process in it meanwhile."""
    client.connect(cluster.address)
    yield cluster
    ray.shutdown()


def each_test(nodes: LocalCluster) -> Iterator[LocalCluster]:
    """The cluster as each test finds it, whole, and in which it leaves nothing of its run behind."""
    heal(nodes)
    yield nodes
    try:
        wait_until(lambda: not left_in_cluster(nodes), "the processes of the run to be gone", 20.0)
    except AssertionError:
        left = left_in_cluster(nodes)
        clear(nodes)
        raise AssertionError(f"the test has left {left}") from None


@contextlib.contextmanager
def something_in_the_way(folder: Path) -> Iterator[None]:
    """What lies in the folder cannot be reached meanwhile, and nothing be put there."""
    aside = folder.with_name(f"{folder.name}-aside")
    folder.rename(aside)
    # Nobody, root included, can make a folder below a file.
    folder.write_text("in the way")
    yield
    folder.unlink()
    aside.rename(folder)


def left_of_run(run_id: str) -> list[str]:
    """Named actors and placement groups."""
    table = ray.util.placement_group_table().values()
    groups = [entry["name"] for entry in table if entry["state"] != "REMOVED"]
    actors = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in (*groups, *actors) if name.startswith(f"elastic:{run_id}:" if run_id else "elastic:")]


def left_in_cluster(cluster: LocalCluster) -> list[str]:
    """What any run has in the cluster: named actors, placement groups, and processes of actors."""
    return [*left_of_run(""), *(f"process {pid}: {title}" for pid, title in actor_processes(cluster).items())]


def clear(cluster: LocalCluster) -> None:
    """The next test must not inherit a run that this one has lost control of."""
    remove_runs()
    wait_until(lambda: not left_in_cluster(cluster), "the cluster to be clear")


def remove_runs() -> None:
    """Kill every named actor and remove every placement group."""
    for entry in ray.util.list_named_actors(all_namespaces=True):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(entry["name"], entry["namespace"]), no_restart=True)
    for identity, entry in ray.util.placement_group_table().items():
        if entry["state"] != "REMOVED":
            ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(identity))))


def actor_processes(cluster: LocalCluster) -> dict[int, str]:
    """Processes of the cluster in which an actor of a run lives."""
    return actors_among(processes.descendants([cluster.keeper_pid], processes.table()))


def actors_among(pids: Iterable[int]) -> dict[int, str]:
    """Those in which an actor of a run lives; Ray titles them by class."""
    found = {}
    for pid in pids:
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if title.startswith(_ACTORS) or _FORK_SERVER in title:
            found[pid] = title
    return found


def heal(cluster: LocalCluster) -> None:
    """Every node alive again."""
    for node in cluster.nodes():
        if node.state is NodeState.FROZEN:
            cluster.thaw_node(node.name)
        elif node.state is NodeState.LOST:
            cluster.add_node(node.name)


def kill_together(cluster: LocalCluster, *names: str) -> None:
    """Several nodes at one instant: stopped before the first is killed, so that none can help to replace another."""
    for name in names:
        cluster.freeze_node(name)
    for name in names:
        cluster.kill_node(name)


class Footprint:
    """What a cluster has on this machine next to itself: processes, its folder, files in shared memory."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._folder = cluster.directory
        self._keeper = cluster.keeper_pid
        self._shared: set[str] = set()
        self.look()

    def look(self) -> None:
        for pid in processes.descendants([self._keeper], processes.table()):
            self._shared |= _shared_memory(pid)

    def left(self) -> list[str]:
        tag = f"{self._folder.name}/"
        tagged = [p for p in processes.table() if processes.environment(p).get(TAG, "").startswith(tag)]
        files = [path for path in (str(self._folder), *self._shared) if os.path.exists(path)]
        return [*(f"process {pid}" for pid in tagged), *files]


def _shared_memory(pid: int) -> set[str]:
    """Files in /dev/shm that the process has mapped or open."""
    try:
        mapped = {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
        opened = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return set()
    return {path for path in mapped | opened if path.startswith("/dev/shm/") and not path.endswith("(deleted)")}
