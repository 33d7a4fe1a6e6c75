"""A run's log through broken streams, new pods and a late verdict: every line once, and the run's own end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from elastic_cluster.kube.client.api import Limits, Manifest, Ref
from elastic_cluster.kube.client.apply import apply_run
from elastic_cluster.kube.client.errors import KubeError, KubeNotFound, KubeRefused, KubeUnavailable
from elastic_cluster.kube.client.log_cursor import LogCursor
from elastic_cluster.kube.client.logs import Follower
from elastic_cluster.kube.client.official import OfficialClient
from elastic_cluster.kube.client.status import RunStatus
from hypothesis import given
from hypothesis import strategies as st
from kube_fake import FakeKubeRay, FakeKubernetes
from kube_fake.logs import PodLog
from kube_samples import connected, ray_cluster, ray_job

# As Go writes fractions: without trailing zeros. Equal times do occur.
TIMES = ["00.000000001", "00.5", "00.5", "00.500000001", "01", "01", "01.25", "02.1", "02.1", "02.1", "03"]


def stamped(texts: list[str]) -> list[str]:
    return [f"2026-01-01T00:00:{TIMES[index % len(TIMES)]}Z {text}" for index, text in enumerate(texts)]


@given(st.integers(0, len(TIMES)), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 45)), max_size=8))
def test_every_line_is_read_once_however_often_the_stream_is_cut(count: int, cuts: list[tuple[int, int]]) -> None:
    texts = [f"line {number}" for number in range(count)]
    log = PodLog(stamped(texts), ended=True, cuts=list(cuts))
    cursor, read = LogCursor(), []
    for _ in range(len(cuts) + 1):
        cursor.begin()
        with suppress(BrokenPipeError):
            for chunk in log.stream(cursor.since, True, True, 0.0):
                # As a network would hand it on.
                for part in (chunk[:7], chunk[7:]):
                    read += list(cursor.lines(part))
    assert read == texts


def test_a_clock_that_is_put_back_loses_no_line() -> None:
    cursor = LogCursor()
    cursor.begin()
    assert list(cursor.lines(b"2026-01-01T00:00:05Z a\n2026-01-01T00:00:01Z b\n2026-01-01T00:00:01Z c\n")) == [
        "a",
        "b",
        "c",
    ]
    assert cursor.since == "2026-01-01T00:00:01Z"


@dataclass
class World:
    """`on` says what happens after a line, or after something was said or waited for; each happens once."""

    kubernetes: FakeKubernetes
    client: OfficialClient
    operator: FakeKubeRay
    lines: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    on: dict[str, Callable[[], object]] = field(default_factory=dict)

    def follower(self) -> Follower:
        def put(line: str) -> None:
            self.lines.append(line)
            self._happens(line)

        def say(sentence: str) -> None:
            self.said.append(sentence)
            self._happens(sentence)

        return Follower(self.client, "gpt", "team", put, say, wait=lambda seconds: self._happens("waiting"))

    def log(self, pod: str) -> PodLog:
        return self.kubernetes.log("team", pod, "ray-job-submitter")

    def _happens(self, what: str) -> None:
        self.on.pop(what, lambda: None)()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with FakeKubernetes() as kubernetes, connected(kubernetes, tmp_path, monkeypatch) as client:
        apply_run(client, "gpt", [ray_job()])
        yield World(kubernetes, client, FakeKubeRay(kubernetes))


def test_a_log_is_followed_to_the_verdict(world: World) -> None:
    pod = world.operator.run("gpt")
    log = world.log(pod)
    log.write(*stamped(["one", "two"]))
    world.on["two"] = lambda: (log.write("2026-01-01T00:00:09Z three"), log.end(), world.operator.end_pod(pod))
    # The pod ends some seconds before KubeRay knows how the job has.
    world.on["run gpt is running"] = lambda: world.operator.finish("gpt", "STOPPED")
    status = world.follower().follow()
    assert world.lines == ["one", "two", "three"]
    assert (status.state, status.over) == ("stopped", True)


def test_cuts_repeat_and_lose_nothing(world: World) -> None:
    texts = [f"line {number}" for number in range(len(TIMES))]
    pod = world.operator.run("gpt")
    log = world.log(pod)
    log.cuts += [(2, 10), (0, 3), (4, 0)]
    log.write(*stamped(texts))

    def ends() -> None:
        log.end()
        world.operator.end_pod(pod)
        world.operator.finish("gpt", "SUCCEEDED")

    world.on[texts[-1]] = ends
    assert world.follower().follow().state == "finished"
    assert world.lines == texts
    assert len(log.opened) >= 4


def test_a_connection_on_which_nothing_comes_is_opened_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be dead: a firewall that forgets it tells neither side."""
    pod = world.operator.run("gpt")
    log = world.log(pod)
    log.write(*stamped(["one"]))

    def ends() -> None:
        log.write("2026-01-01T00:00:09Z two")
        log.end()
        world.operator.end_pod(pod)
        world.operator.finish("gpt", "SUCCEEDED")

    world.on["waiting"] = ends
    with connected(world.kubernetes, tmp_path, monkeypatch, Limits(idle_s=0.1)) as client:
        world.client = client
        assert world.follower().follow().state == "finished"
    assert world.lines == ["one", "two"]


def test_a_run_that_has_not_started_is_waited_for_and_the_reason_is_said(world: World) -> None:
    def starts() -> None:
        pod = world.operator.run("gpt")
        log = world.log(pod)
        log.write(*stamped(["one"]))
        log.end()
        world.operator.end_pod(pod)
        world.operator.finish("gpt", "SUCCEEDED")

    world.operator.reconcile()
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    }
    world.kubernetes.set_status("Pod", "team", "gpt-abcde-spot-0", {"conditions": [condition]})
    sentence = (
        "run gpt is starting: pod gpt-abcde-spot-0: Unschedulable: "
        "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    )
    world.on[sentence] = starts
    assert world.follower().follow().state == "finished"
    assert (world.lines, world.said) == (["one"], [sentence])


def test_a_container_that_is_being_started_again_is_waited_for(world: World) -> None:
    pod = world.operator.run("gpt")
    again = {"name": "ray-job-submitter", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    world.kubernetes.set_status("Pod", "team", pod, {"phase": "Running", "containerStatuses": [again]})
    sentence = f"run gpt is running: pod {pod}: CrashLoopBackOff"
    world.on[sentence] = lambda: world.operator.finish("gpt", "SUCCEEDED")
    assert world.follower().follow().state == "finished"
    assert world.said == [sentence]


def test_an_api_server_that_is_away_is_waited_for_within_a_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = world.operator.run("gpt")
    world.log(pod).write(*stamped(["one"]))
    real, asked = world.client.get, 0

    def get(ref: Ref, *, metadata_only: bool = False) -> Manifest | None:
        nonlocal asked
        asked += 1
        if asked < 5 or not world.on:
            raise KubeUnavailable("the Kubernetes API cannot be reached")
        return real(ref, metadata_only=metadata_only)

    def ends() -> None:
        world.log(pod).end()
        world.operator.end_pod(pod)
        world.operator.finish("gpt", "SUCCEEDED")

    monkeypatch.setattr(world.client, "get", get)
    world.on |= {"one": ends, "never": ends}
    assert world.follower().follow().state == "finished"
    assert world.said == ["the Kubernetes API cannot be reached; the run may still be running; retrying"]
    world.on.clear()
    with pytest.raises(KubeUnavailable):
        world.follower().follow()


def test_the_next_submitter_goes_on(world: World) -> None:
    first = world.operator.run("gpt")
    world.log(first).write(*stamped(["one"]))

    def replaced() -> None:
        world.log(first).end()
        world.operator.end_pod(first, 1)
        second = world.operator.run("gpt")
        world.log(second).write(*stamped(["one", "two"]))
        world.on["two"] = lambda: (
            world.log(second).end(),
            world.operator.end_pod(second),
            world.operator.finish(
                "gpt", "FAILED", "Job entrypoint command failed with exit code 105. No logs available."
            ),
        )

    world.on["one"] = replaced
    status = world.follower().follow()
    assert world.lines == ["one", "one", "two"]
    assert world.said == ["the log continues in pod gpt-submit1, from the first line of its job"]
    assert (status.state, status.exit_code) == ("failed", 105)


def test_a_run_that_is_deleted_meanwhile_has_no_verdict(world: World) -> None:
    pod = world.operator.run("gpt")
    world.log(pod).write(*stamped(["one"]))

    def deleted() -> None:
        world.kubernetes.table.delete(world.kubernetes.resource("RayJob"), "team", "gpt", {})
        world.operator.reconcile()
        world.log(pod).end()

    world.on["one"] = deleted
    with pytest.raises(KubeError, match="was deleted while its log was followed; how it ended is not known"):
        world.follower().follow()


def test_a_log_that_is_not_followed_ends_where_it_is(world: World) -> None:
    with pytest.raises(KubeNotFound, match="run gpt has no log yet: run gpt is pending"):
        world.follower().show()
    pod = world.operator.run("gpt")
    world.log(pod).write(*stamped(["one", "two"]))
    status: RunStatus = world.follower().show()
    assert (world.lines, status.state) == (["one", "two"], "running")


def test_a_cluster_without_a_job_has_no_log(world: World) -> None:
    world.kubernetes.table.delete(world.kubernetes.resource("RayJob"), "team", "gpt", {})
    apply_run(world.client, "gpt", [ray_cluster()])
    with pytest.raises(KubeRefused, match=r"is a RayCluster without a job.*port-forward service/gpt-head-svc 8265"):
        world.follower().follow()
