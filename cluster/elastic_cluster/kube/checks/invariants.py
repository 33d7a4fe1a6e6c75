"""Rules for our own manifests beyond validity: breaking one is a mistake that shows only weeks later."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elastic_cluster.kube.checks.walk import Json, cluster_of, first_container, groups_of, templates, variable
from elastic_cluster.kube.manifests import labels, names, quantity

Sentences = Iterator[str]

_COMPUTE = {"cpu", "memory", "ephemeral-storage"}
_SECRET_VARIABLES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS")


def autoscaler(manifest: Json) -> Sentences:
    found = cluster_of(manifest)
    if found is not None:
        path, spec = found
        if not spec.get("enableInTreeAutoscaling"):
            yield f"{path}.enableInTreeAutoscaling: must be on, or a lost node is never replaced"
        if (spec.get("autoscalerOptions") or {}).get("version") != "v2":
            yield f"{path}.autoscalerOptions.version: must be v2, which drains a node before it takes it away"


def authentication(manifest: Json) -> Sentences:
    found = cluster_of(manifest)
    if found is not None and (found[1].get("authOptions") or {}).get("mode") != "token":
        yield f"{found[0]}.authOptions.mode: must be token; otherwise anyone who can reach a pod can run code in it"


def literal_credentials(manifest: Json) -> Sentences:
    for template in templates(manifest):
        for path, container in template.containers:
            for item in container.get("env") or []:
                name = str(item.get("name"))
                if "value" in item and set(name.upper().split("_")) & set(_SECRET_VARIABLES):
                    yield f"{path}.env.{name}: looks like a credential and must come from a Secret"
    found = cluster_of(manifest)
    options = (found[1].get("gcsFaultToleranceOptions") or {}) if found else {}
    for key in ("redisUsername", "redisPassword"):
        if found and "value" in (options.get(key) or {}):
            yield f"{found[0]}.gcsFaultToleranceOptions.{key}.value: must come from a Secret"


def accelerators(manifest: Json) -> Sentences:
    for template in templates(manifest):
        for path, container in template.containers:
            resources = container.get("resources") or {}
            requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
            for device in sorted((requests.keys() | limits.keys()) - _COMPUTE):
                asked, most = requests.get(device), limits.get(device)
                if str(asked) != str(most):
                    yield f"{path}.resources: {device} is requested as {asked} and limited to {most}"
                elif not str(most).isdigit():
                    yield f"{path}.resources.limits.{device}: {most} is not a whole number"


def memory(manifest: Json) -> Sentences:
    """Without a limit one pod takes the machine down; with a smaller request it is the first to be killed."""
    for template in templates(manifest):
        for path, container in template.containers:
            resources = container.get("resources") or {}
            requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
            if "memory" not in limits or requests.get("memory") != limits["memory"]:
                yield f"{path}.resources: the memory that is requested must be the limit"


def shared_memory(manifest: Json) -> Sentences:
    for template in templates(manifest):
        if template.role == "submitter":
            continue
        container = first_container(template)
        mounted = [m.get("name") for m in container.get("volumeMounts") or [] if m.get("mountPath") == "/dev/shm"]
        volume: Json = next((v for v in template.spec.get("volumes") or [] if v.get("name") in mounted), {})
        empty = volume.get("emptyDir") or {}
        limit = ((container.get("resources") or {}).get("limits") or {}).get("memory", "0")
        path = f"{template.path}.spec.volumes"
        if empty.get("medium") != "Memory" or "sizeLimit" not in empty:
            yield f"{path}: /dev/shm must be an emptyDir in memory with a size"
        elif quantity.parse(empty["sizeLimit"]) >= quantity.parse(limit):
            yield f"{path}: /dev/shm ({empty['sizeLimit']}) is part of the container's memory ({limit})"
        else:
            store = (template.group.get("rayStartParams") or {}).get("object-store-memory", "0")
            if not 0 < quantity.parse(store) <= quantity.parse(empty["sizeLimit"]):
                yield f"{template.path}: Ray's object store ({store}) must fit into /dev/shm ({empty['sizeLimit']})"


def drain(manifest: Json) -> Sentences:
    """A draining node must receive the signal, and must have the time that it announces to the run."""
    annotations = (manifest.get("metadata") or {}).get("annotations") or {}
    for template in templates(manifest):
        if template.role == "submitter":
            continue
        container = first_container(template)
        path = f"{template.path}.spec"
        grace_s = template.spec.get("terminationGracePeriodSeconds", 30)
        told = (variable(container, names.DRAIN_VARIABLE) or {}).get("value")
        if told is None or not told.isdigit():
            yield f"{path}.containers[0].env: {names.DRAIN_VARIABLE} is missing"
        elif grace_s <= int(told):
            yield f"{path}.terminationGracePeriodSeconds: {grace_s} is not longer than the drain, which is {told}"
        elif template.role == "worker" and int(told) == 0:
            yield f"{path}.containers[0].env: {names.DRAIN_VARIABLE} is 0, so the run would hear of nothing"
        if annotations.get(names.OVERWRITE_COMMAND) != "true" or "exec $KUBERAY" not in " ".join(
            container.get("args") or []
        ):
            yield f"{path}.containers[0].args: Ray must be the first process of the container, or it gets no SIGTERM"


def head_outlasts_workers(manifest: Json) -> Sentences:
    grace: dict[str, list[int]] = {"head": [], "worker": []}
    for template in templates(manifest):
        if template.role in grace:
            grace[template.role].append(template.spec.get("terminationGracePeriodSeconds", 30))
    if grace["head"] and grace["worker"] and max(grace["worker"]) > min(grace["head"]):
        yield (
            f"{cluster_of(manifest)[0]}.headGroupSpec: goes after {min(grace['head'])} s, and workers that still drain "  # type: ignore[index]
            f"for {max(grace['worker'])} s lose their control store"
        )


def idle_timeout(manifest: Json, node_start_s: int = 0) -> Sentences:
    found = cluster_of(manifest)
    if found is None:
        return
    path, spec = found
    usual = (spec.get("autoscalerOptions") or {}).get("idleTimeoutSeconds", 60)
    for place, group in [(f"{path}.autoscalerOptions", {"idleTimeoutSeconds": usual}), *groups_of(manifest)]:
        value = group.get("idleTimeoutSeconds", usual)
        if value <= node_start_s:
            yield f"{place}.idleTimeoutSeconds: {value} is not longer than the {node_start_s} s in which a node starts"


def accounts(manifest: Json) -> Sentences:
    for template in templates(manifest):
        if template.role != "head" and template.spec.get("automountServiceAccountToken") is not False:
            yield f"{template.path}.spec.automountServiceAccountToken: must be false; user code has no use for it"


def controller(manifest: Json) -> Sentences:
    """Driver and controller have a pod of their own, where no worker is put and which is not the head."""
    found = cluster_of(manifest)
    if found is None:
        return
    path, spec = found
    head = (spec.get("headGroupSpec") or {}).get("rayStartParams") or {}
    if head.get("num-cpus") != "0":
        yield f"{path}.headGroupSpec.rayStartParams.num-cpus: must be 0, so that nothing of the run is put on the head"
    pods = [g for _, g in groups_of(manifest) if names.CONTROLLER_RESOURCE in (g.get("resources") or {})]
    if [(g.get("minReplicas"), g.get("maxReplicas")) for g in pods] != [(1, 1)]:
        yield f"{path}.workerGroupSpecs: exactly one pod must have {names.CONTROLLER_RESOURCE}"
    elif (pods[0].get("resources") or {}).get("CPU") != "0":
        yield f"{path}.workerGroupSpecs: the controller's pod must have no CPUs for Ray to give away"


def ownership(manifest: Json) -> Sentences:
    if labels.run_of(manifest) is None:
        yield f"metadata.labels: needs {labels.MANAGED_BY} and {labels.RUN}: `elastic kube delete` looks for them"


RULES: tuple[Callable[[Json], Sentences], ...] = (
    autoscaler,
    authentication,
    literal_credentials,
    accelerators,
    memory,
    shared_memory,
    drain,
    head_outlasts_workers,
    accounts,
    controller,
    ownership,
)
