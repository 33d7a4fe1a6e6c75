"""A run's log: what the entry point prints, through however many pods and connections it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_cluster.kube.client.api import Cluster, Manifest, Ref
from elastic_cluster.kube.client.errors import KubeError, KubeNotFound, KubeRefused, KubeUnavailable
from elastic_cluster.kube.client.log_cursor import LogCursor
from elastic_cluster.kube.client.runs import find_main, submitters
from elastic_cluster.kube.client.status import RunStatus, run_status

# Name of the container that follows the job, of KubeRay's making; the first container where the pod is the user's own.
_SUBMITTER = "ray-job-submitter"
_WATCH_S = 15.0
# KubeRay marks a job as over some seconds after its submitter has ended.
_AGAIN_S = 1.0
# An API server that is being upgraded is back within a few minutes.
_AWAY_TIMES = 15


@dataclass
class Follower:
    """`put` gets each line of the log; `say` gets each sentence about what is awaited, once.

    `wait` is called with the seconds until the next look where nothing can be watched.
    """

    cluster: Cluster
    run_id: str
    namespace: str
    put: Callable[[str], None]
    say: Callable[[str], None]
    wait: Callable[[float], None] = time.sleep
    _cursors: dict[str, LogCursor] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def show(self) -> RunStatus:
        """What there is so far. Raises KubeError, for one KubeNotFound where no pod has printed anything yet."""
        job = self._job()
        pods = submitters(self.cluster, job)
        if not pods and not run_status(job).over:
            raise KubeNotFound(f"run {self.run_id} has no log yet: {self._awaited(job, pods)}")
        for pod in pods:
            self._read(pod, follow=False)
        return run_status(job)

    def follow(self) -> RunStatus:
        """Until the run is over, however often a connection or a submitter's pod is lost. Raises KubeError."""
        job, away = self._job(), 0
        while True:
            try:
                job = self._newest(job)
                status = self._look(job)
                away = 0
            except KubeUnavailable as error:
                # Each request has been repeated for `Limits.retry_s` already.
                away += 1
                if away > _AWAY_TIMES:
                    raise
                self._tell(f"{error}; the run may still be running; retrying")
                self.wait(_AGAIN_S)
                continue
            if status.over:
                return status

    def _look(self, job: Manifest) -> RunStatus:
        """The log as far as its streams go; where there is none, until the job changes."""
        status = run_status(job)
        pods = submitters(self.cluster, job)
        for pod in pods:
            self._read(pod, follow=not status.over and _runs(pod))
        if not status.over and not any(_runs(pod) and not _waits(pod) for pod in pods):
            self._tell(self._awaited(job, pods))
            self._watch(job)
        return status

    def _job(self) -> Manifest:
        main = find_main(self.cluster, self.run_id, self.namespace)
        if main["kind"] != "RayJob":
            name, namespace = main["metadata"]["name"], self.namespace
            raise KubeRefused(
                f"run {self.run_id} is a RayCluster without a job, so it has no log of its own: "
                f"`kubectl -n {namespace} port-forward service/{name}-head-svc 8265`, then `elastic logs {self.run_id}`"
            )
        return main

    def _newest(self, job: Manifest) -> Manifest:
        """The same RayJob. One that was deleted meanwhile has no verdict."""
        ref = Ref.of(job)
        now = self.cluster.get(ref)
        if now is None or now["metadata"]["uid"] != job["metadata"]["uid"]:
            raise KubeError(f"{ref} was deleted while its log was followed; how it ended is not known")
        return now

    def _read(self, pod: Manifest, *, follow: bool) -> None:
        name = str(pod["metadata"]["name"])
        if _waits(pod):
            return
        if name not in self._cursors and self._cursors:
            self._tell(f"the log continues in pod {name}, from the first line of its job")
        cursor = self._cursors.setdefault(name, LogCursor())
        cursor.begin()
        try:
            for chunk in self.cluster.read(Ref.of(pod), _container(pod), cursor.since, follow):
                for line in cursor.lines(chunk):
                    self.put(line)
        except KubeNotFound:
            # The pod went between the list and now; the next round sees what there is instead.
            return
        if follow:
            # It ended, or only the connection did. Either way the next round is not at once.
            self.wait(_AGAIN_S)

    def _watch(self, job: Manifest) -> None:
        """Until the job changes or some time has passed; a pod that starts is seen no later than the job's status."""
        for _ in self.cluster.watch(Ref.of(job), job["metadata"]["resourceVersion"], _WATCH_S):
            return

    def _awaited(self, job: Manifest, pods: list[Manifest]) -> str:
        status = run_status(job, None, [*pods, *self._ray_pods(job)])
        why = "; ".join(status.problems[:3]) or status.reason
        return f"run {self.run_id} is {status.state}" + (f": {why}" if why else "")

    def _ray_pods(self, job: Manifest) -> list[Manifest]:
        name = (job.get("status") or {}).get("rayClusterName")
        return self.cluster.find("v1", "Pod", self.namespace, f"ray.io/cluster={name}") if name else []

    def _tell(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self.say(sentence)


def _container(pod: Manifest) -> str:
    names = [str(each["name"]) for each in pod["spec"]["containers"]]
    return _SUBMITTER if _SUBMITTER in names else names[0]


def _runs(pod: Manifest) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running"


def _waits(pod: Manifest) -> bool:
    """A container that has not started yet has no log, and asking for it is an error."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return all("waiting" in (each.get("state") or {}) for each in statuses)
