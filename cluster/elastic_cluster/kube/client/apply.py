"""From manifests to objects in the cluster: all of them, or none."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass

from elastic_cluster.kube.client.api import Cluster, Manifest, Ref, Stored
from elastic_cluster.kube.client.errors import AlreadyThere, KubeDenied, KubeError, KubeRefused
from elastic_cluster.kube.client.secrets import SecretUse, token_secret, uses
from elastic_cluster.kube.client.status import run_status
from elastic_cluster.kube.manifests.labels import run_of

_log = logging.getLogger(__name__)
MAIN_KINDS = ("RayJob", "RayCluster")


@dataclass(frozen=True)
class Applied:
    """`outcome`: "created", "changed", "unchanged"; of a dry run what it would be. `object` is as the server has it."""

    ref: Ref
    outcome: str
    object: Manifest


def apply_run(
    cluster: Cluster, run_id: str, manifests: list[Manifest], *, dry_run: bool = False, force: bool = False
) -> list[Applied]:
    """Every object is tried in a server-side dry run first; if one is refused, nothing is created.

    What was created before something failed all the same is deleted again. Raises KubeError.
    """
    plan = _Plan(cluster, run_id, manifests, force)
    tried = plan.apply(dry_run=True)
    return tried if dry_run else plan.apply(dry_run=False)


def with_live_replicas(wanted: Manifest, live: Manifest | None) -> Manifest:
    """A RayCluster's `replicas` and `scaleStrategy` are the autoscaler's once it lives: what it has set is kept.

    Worker groups are one list without keys, so applying ours would put them back and end workers at random.
    """
    if wanted["kind"] != "RayCluster" or live is None:
        return wanted
    groups = {group["groupName"]: group for group in live["spec"].get("workerGroupSpecs", [])}
    result = copy.deepcopy(wanted)
    for group in result["spec"].get("workerGroupSpecs", []):
        now = groups.get(group["groupName"], {})
        group |= {key: copy.deepcopy(now[key]) for key in ("replicas", "scaleStrategy") if key in now}
        if "replicas" in group:
            group["replicas"] = min(max(group["replicas"], group["minReplicas"]), group["maxReplicas"])
    return result


class _Plan:
    """The present objects and the actions on them, looked up once."""

    def __init__(self, cluster: Cluster, run_id: str, manifests: list[Manifest], force: bool) -> None:
        self._cluster, self._force = cluster, force
        # A RayJob starts pods as soon as it is there: what they need must be there before.
        self._manifests = sorted(manifests, key=lambda manifest: manifest["kind"] in MAIN_KINDS)
        self._refs = [Ref.of(manifest) for manifest in self._manifests]
        for manifest, ref in zip(self._manifests, self._refs, strict=True):
            if run_of(manifest) != run_id:
                raise KubeRefused(
                    f"{ref} does not carry the labels of run {run_id}, so it could not be deleted with it"
                )
        self._live = {ref: cluster.get(ref, metadata_only=ref.kind == "Secret") for ref in self._refs}
        for ref, live in self._live.items():
            _check_ours(ref, live, run_id)
        self._secrets = self._missing_secrets(run_id)

    def apply(self, *, dry_run: bool) -> list[Applied]:
        done: list[Applied] = []
        try:
            for secret in self._secrets:
                done.extend(self._create(secret, dry_run))
            for manifest, ref in zip(self._manifests, self._refs, strict=True):
                wanted = with_live_replicas(manifest, self._live[ref])
                stored = self._cluster.apply(wanted, dry_run=dry_run, force=self._force)
                done.append(Applied(ref, _outcome(self._live[ref], stored, dry_run), stored.object))
        except BaseException:
            if not dry_run:
                self._undo(done)
            raise
        return done

    def _create(self, secret: Manifest, dry_run: bool) -> list[Applied]:
        try:
            made = self._cluster.create(secret, dry_run=dry_run)
        except AlreadyThere:
            # Somebody was quicker; theirs is as good as ours.
            return []
        return [Applied(Ref.of(secret), "created", made)]

    def _missing_secrets(self, run_id: str) -> list[Manifest]:
        namespaces = {ref.namespace for ref in self._refs}
        if len(namespaces) != 1:
            raise KubeRefused(f"the objects of a run belong into one namespace, not {len(namespaces)}")
        namespace = namespaces.pop()
        missing = [use for use in uses(self._manifests) if self._lacks(use, namespace)]
        others = [use.name for use in missing if not use.token]
        if others:
            raise KubeRefused(
                f"namespace {namespace} has no secret {', '.join(others)}, which the pods need: "
                f"`kubectl -n {namespace} create secret generic {others[0]} --from-literal=KEY=...`"
            )
        return [token_secret(use.name, namespace, run_id) for use in missing]

    def _lacks(self, use: SecretUse, namespace: str) -> bool:
        try:
            return self._cluster.get(Ref("v1", "Secret", namespace, use.name), metadata_only=True) is None
        except KubeDenied:
            # Without `get` permission we cannot check; creating the Secret is safe if it already exists.
            return use.token

    def _undo(self, done: list[Applied]) -> None:
        for applied in reversed(done):
            if applied.outcome == "created":
                try:
                    self._cluster.delete(applied.ref, applied.object["metadata"]["uid"])
                except KubeError as error:
                    _log.warning("%s was created and could not be deleted again: %s", applied.ref, error)


def _check_ours(ref: Ref, live: Manifest | None, run_id: str) -> None:
    if live is None:
        return
    if run_of(live) != run_id:
        owner = run_of(live)
        whose = f"it belongs to run {owner}" if owner else "it was not made by `elastic kube apply`"
        raise KubeRefused(f"there is already a {ref}, and {whose}: choose another run id")
    if "deletionTimestamp" in live["metadata"]:
        raise KubeRefused(f"{ref} is being deleted: wait for it (`elastic kube status {run_id}`), then apply again")
    if ref.kind == "RayJob" and (status := run_status(live)).over:
        raise KubeRefused(
            f"run {run_id} is over ({status.state}), and a RayJob runs once: "
            f"`elastic kube delete {run_id}`, then apply again; the run continues from its newest checkpoint"
        )


def _outcome(live: Manifest | None, stored: Stored, dry_run: bool) -> str:
    # Not by the earlier look-up: if another user has created it since, we must not remove it.
    if stored.created:
        return "created"
    if live is None:
        return "changed"
    if dry_run:
        return "unchanged" if _content(live) == _content(stored.object) else "changed"
    versions = {each["metadata"]["resourceVersion"] for each in (live, stored.object)}
    return "unchanged" if len(versions) == 1 else "changed"


def _content(manifest: Manifest) -> Manifest:
    return {key: value for key, value in manifest.items() if key != "metadata"}
