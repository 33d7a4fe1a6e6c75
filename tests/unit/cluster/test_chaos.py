"""Plans of faults: parsed, dealt out by step, and struck at the node that was meant."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from elastic_cluster.chaos import Action, Chaos, Fault, Injector, node_name, victim
from elastic_cluster.source import ClusterError, NodeInfo, NodeState
from hypothesis import given
from hypothesis import strategies as st

targets = st.none() | st.from_regex(r"[a-z0-9_-]{1,8}", fullmatch=True)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    action = draw(st.sampled_from(Action))
    target = None if "control" in action.value else draw(targets)
    return Fault(action, draw(st.integers(0, 1000)), target)


@given(st.lists(faults(), max_size=12))
def test_a_plan_written_out_reads_back_as_the_same_faults(found: list[Fault]) -> None:
    plan = Chaos.parse(",".join(map(str, found)))
    assert plan.faults == tuple(sorted(found, key=lambda fault: fault.step))
    assert Chaos.parse(str(plan)) == plan


@given(st.lists(faults(), max_size=12), st.lists(st.integers(0, 1000), max_size=20))
def test_every_fault_falls_due_once_and_never_early(found: list[Fault], steps: list[int]) -> None:
    plan = Chaos.parse(",".join(map(str, found)))
    dealt: list[Fault] = []
    for step in [*steps, 1000]:
        now, rest = plan.due(step)
        assert all(fault.step <= step for fault in now)
        assert all(fault.step > step for fault in rest.faults)
        assert now + rest.faults == plan.faults
        dealt += now
        plan = rest
    assert dealt == sorted(found, key=lambda fault: fault.step)


def test_faults_of_one_step_keep_the_order_they_were_written_in() -> None:
    now, rest = Chaos.parse("kill-node@step=9, add-node@step=4 ,freeze-node:2@step=4,").due(4)
    assert now == (Fault(Action.ADD_NODE, 4), Fault(Action.FREEZE_NODE, 4, "2"))
    assert rest == Chaos((Fault(Action.KILL_NODE, 9),))
    assert Chaos.parse("") == Chaos()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kil-node@step=4", "'kil-node' in .* the nearest of kill-node, .* is 'kill-node'"),
        ("freeze@step=4", "'freeze' in .* is 'freeze-node'"),
        ("kill_worker@step=4", "is 'kill-worker'"),
        ("kill-node@stop=4", "'stop' in .* is no key; the nearest of step is 'step'"),
        ("kill-node@@=4", "is no key; the nearest of step is 'step'"),
        ("kill-node", "does not say when: write kill-node@step=N"),
        ("kill-node@step=-1", "not a whole number: '-1'"),
        ("kill-node@step=four", "not a whole number: 'four'"),
        ("kill-node@step=\u0664", "not a whole number"),
        ("kill-node@step", "is no fault"),
        ("kill-node:@step=4", "no target after the colon"),
        ("kill-controller:2@step=4", "there is one controller, so kill-controller takes no target"),
        ("kill-control-store:node-1@step=4", "there is one control store, so kill-control-store takes no target"),
        ("kill-node@step=4;add-node@step=8", "not a whole number: '4;add-node@step=8'"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_nearest_word(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Chaos.parse(text)


def test_only_a_plan_that_kills_the_control_store_needs_one_that_lasts() -> None:
    assert Chaos.parse("kill-node@step=1,kill-control-store@step=2").strikes_control_store
    assert not Chaos.parse("kill-node@step=1,kill-controller@step=2").strikes_control_store


@given(st.text(max_size=30))
def test_any_text_is_a_plan_or_a_value_error(text: str) -> None:
    try:
        plan = Chaos.parse(text)
    except ValueError:
        return
    assert Chaos.parse(str(plan)) == plan


def _node(number: int, state: NodeState = NodeState.ALIVE) -> NodeInfo:
    return NodeInfo(f"node-{number}", state, head=number == 0, node_id=f"id{number}", raylet_pid=100 + number)


class TestVictim:
    nodes = (_node(0), _node(1), _node(2), _node(3, NodeState.LOST))

    def test_is_the_last_live_node(self) -> None:
        assert victim(self.nodes, None, None).name == "node-2"

    @pytest.mark.parametrize("carrying", [["node-0", "node-1"], ["id1", "id3"]])
    def test_carries_workers_by_name_or_by_ray_id(self, carrying: list[str]) -> None:
        assert victim(self.nodes, None, carrying).name == "node-1"

    def test_is_the_head_only_by_name(self) -> None:
        assert victim(self.nodes, "0", None).head
        assert victim(self.nodes, "node-0", []).head
        with pytest.raises(ClusterError, match="no node but the head is alive and carries workers"):
            victim(self.nodes, None, ["node-0"])
        with pytest.raises(ClusterError, match="no node but the head is alive;"):
            victim(self.nodes[:1], None, None)

    def test_unknown_is_refused(self) -> None:
        with pytest.raises(ClusterError, match="no node '7'; there are node-0, node-1"):
            victim(self.nodes, "7", None)


def test_numbers_are_short_for_names() -> None:
    assert (node_name("12"), node_name("gpu-1")) == ("node-12", "gpu-1")


@dataclass
class Recorder:
    """Records what it is asked to break."""

    found: tuple[NodeInfo, ...]
    asked: list[tuple[str, object]] = field(default_factory=list)

    def nodes(self) -> tuple[NodeInfo, ...]:
        return self.found

    def _do(self, what: str, argument: object) -> NodeInfo:
        self.asked.append((what, argument))
        return self.found[0]

    def kill_node(self, name: str) -> NodeInfo:
        return self._do("kill", name)

    def add_node(self, name: str | None = None) -> NodeInfo:
        return self._do("add", name)

    def freeze_node(self, name: str) -> NodeInfo:
        return self._do("freeze", name)

    def thaw_node(self, name: str) -> NodeInfo:
        return self._do("thaw", name)

    def drain_node(self, name: str) -> NodeInfo:
        return self._do("drain", name)

    def kill_worker(self, pid: int) -> NodeInfo:
        return self._do("kill worker", pid)

    def kill_control_store(self) -> NodeInfo:
        return self._do("kill", "the control store")

    def restart_control_store(self) -> NodeInfo:
        return self._do("restart", "the control store")


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("kill-node@step=1", ("kill", "node-1")),
        ("kill-node:0@step=1", ("kill", "node-0")),
        ("freeze-node@step=1", ("freeze", "node-1")),
        ("drain-node@step=1", ("drain", "node-1")),
        ("thaw-node@step=1", ("thaw", "node-2")),
        ("thaw-node:1@step=1", ("thaw", "node-1")),
        ("add-node@step=1", ("add", None)),
        ("add-node:3@step=1", ("add", "node-3")),
        ("kill-worker@step=1", ("kill worker", 101)),
        ("kill-worker:5@step=1", ("kill worker", 5)),
        ("kill-controller@step=1", ("kill worker", 42)),
        ("kill-control-store@step=1", ("kill", "the control store")),
        ("restart-control-store@step=1", ("restart", "the control store")),
    ],
)
def test_the_injector_strikes_what_the_fault_names(text: str, asked: tuple[str, object]) -> None:
    def worker_pid(target: str | None, node: NodeInfo | None) -> int:
        if target is not None:
            return int(target)
        assert node is not None
        return node.raylet_pid

    cluster = Recorder((_node(0), _node(1), _node(2, NodeState.FROZEN)))
    injector = Injector(cluster, worker_pid, controller_pid=lambda: 42, carrying=lambda: {"id1", "id2"})
    injector.apply(Chaos.parse(text).faults[0])
    assert cluster.asked == [asked]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill-worker:3@step=1", "kill-worker:3@step=1: the workers of the run are not known here"),
        ("kill-controller@step=1", "the controller of the run is not known here"),
        ("thaw-node@step=1", "no node is frozen"),
    ],
)
def test_a_fault_that_cannot_be_done_says_why(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Injector(Recorder((_node(0), _node(1)))).apply(Chaos.parse(text).faults[0])
