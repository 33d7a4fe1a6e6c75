"""A job file as the `KubeJob` of `elastic_cluster.kube`; what the `kubernetes` section omits is derived from the
job."""

from __future__ import annotations

import math
import posixpath
import shlex
from importlib import metadata
from pathlib import Path

from elastic_cluster.kube.checks.job_rules import refusals
from elastic_cluster.kube.checks.manifest_checks import problems
from elastic_cluster.kube.manifests import job as kube
from elastic_cluster.kube.manifests import names
from elastic_cluster.kube.manifests.render import render

from elastic.core.errors import UsageError
from elastic.core.secrets import redact
from elastic_jobs.job_file.checks import check, refuse
from elastic_jobs.job_file.kubernetes_section import (
    ControlStoreSpec,
    GroupSpec,
    KubernetesSpec,
    NetworkSpec,
    SecretSpec,
)
from elastic_jobs.job_file.spec import JobSpec
from elastic_jobs.job_file.yaml_lines import parse
from elastic_jobs.submit.driver_command import DriverCommand
from elastic_jobs.submit.package import digest, entry_file

# Spot machines of Google and Azure end 30 s after their notice, Amazon's after 120 s.
SPOT_DRAIN_S = 25
_GIB_PER_CPU = 4
_GPU = "nvidia.com/gpu"
_LOCAL_PROTOCOLS = {"file", "local", "memory"}


def manifests(job: kube.KubeJob) -> list[dict[str, object]]:
    """Rendered and checked. Raises UsageError with the first thing that Kubernetes, KubeRay or the run would refuse."""
    for problem in refusals(job):
        raise UsageError(problem)
    rendered = render(job)
    for problem in problems(rendered, job.node_start_s):
        raise UsageError(problem)
    return rendered


def kube_job(
    spec: JobSpec,
    file: Path,
    *,
    run_id: str | None = None,
    namespace: str | None = None,
    image: str | None = None,
    as_cluster: bool = False,
) -> kube.KubeJob:
    """`file` is where `spec` was read from; the other arguments override it. Raises UsageError."""
    section = spec.kubernetes or KubernetesSpec()
    run = run_id or spec.name or file.stem
    if not names.is_name(run):
        raise UsageError(
            f"run id {run!r} cannot be the name of a RayJob, which is lower-case letters, digits and '-', begins with "
            f"a letter and has {names.LONGEST_NAME} characters at most: try --run-id {names.dns_label(run)}"
        )
    the_image = image or section.image
    if the_image is None:
        raise UsageError(
            "no image: name one that holds Ray, this package and your code, with 'kubernetes.image' or --image"
        )
    _check_storage(spec, section)
    refuse(check(spec.job(file, run)))
    place = posixpath.join(section.folder, file.name)
    code = entry_file(file.parent, spec.entry_point)
    return kube.KubeJob(
        name=run,
        run_id=run,
        image=the_image,
        ray_version=metadata.version("ray"),
        command=_driver(place, run, str(spec.storage_url), digest(code)),
        groups=tuple(_group(group, spec, section) for group in section.groups),
        namespace=namespace or section.namespace,
        as_cluster=as_cluster,
        slot=_slot(spec),
        min_slots=spec.sizes[0] // spec.workers_per_slot,
        files={place: _text(file), **_deepspeed_file(file, section.folder)},
        env={name: value.ref() if isinstance(value, SecretSpec) else value for name, value in section.env.items()},
        volumes=tuple(kube.Volume(v.claim, v.mount, v.read_only) for v in section.volumes),
        head=section.head.size(),
        head_place=section.head.place(),
        controller=section.controller.size(),
        controller_place=section.controller.place(),
        control_store=_control_store(section.control_store),
        stop_s=_planned_end_s(spec),
        node_start_s=section.node_start_s,
        idle_timeout_s=section.idle_timeout_s,
        token_secret=section.token_secret,
        backoff_limit=section.backoff_limit,
        ttl_s=section.ttl_s,
        deadline_s=section.deadline_s,
        run_as_user=section.run_as_user,
        pull_policy=section.pull_policy,
        pull_secrets=tuple(section.pull_secrets),
        service_account=section.service_account,
        rbac=section.rbac,
        network=_network(section.network_policy),
        queue=section.queue,
    )


def _deepspeed_file(file: Path, folder: str) -> dict[str, str]:
    """Path in the pods -> text, of a DeepSpeed configuration that the job names by path: the image may hold an older
    version."""
    named = parse(file.read_text(encoding="utf-8"), str(file)).data.get("deepspeed")
    if not isinstance(named, str):
        return {}
    return {posixpath.normpath(posixpath.join(folder, named)): _text(file.parent / Path(named).expanduser())}


def _driver(place: str, run_id: str, storage_url: str, code: str) -> tuple[str, ...]:
    """The driver's command: it attaches to the run, else resumes it from storage, else starts it; for a run that has
    ended it reports the end.

    So KubeRay may execute it again in every new cluster. `exec` replaces the shell, so that Ray's signals reach the
    driver.
    """
    version = metadata.version("ray-elastic")
    command = DriverCommand(place, run_id, 1, "continue", storage_url, version, code=code)
    return tuple(shlex.split(command.line()))


def _text(file: Path) -> str:
    """The file's text, which is sent to the cluster with its comments. Raises UsageError for a secret in it."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    for number, (line, shown) in enumerate(zip(text.splitlines(), redact(text).splitlines(), strict=False), 1):
        if line != shown:
            raise UsageError(
                f"{file} line {number} holds what looks like a credential, and would be readable in a ConfigMap: "
                "put it into a Secret and name that under 'kubernetes.env'"
            )
    return text


def _slot(spec: JobSpec) -> dict[str, float]:
    """The resources of one slot: of all its workers together, which share one node."""
    return {name: amount * spec.workers_per_slot for name, amount in spec.resources_per_worker.items() if amount}


def _group(group: GroupSpec, spec: JobSpec, section: KubernetesSpec) -> kube.Group:
    slot = _slot(spec)
    cpus = max(1, math.ceil(slot.get("CPU", 0)))
    gpus = math.ceil(slot.get("GPU", 0))
    custom = {name: math.ceil(amount) for name, amount in slot.items() if name not in {"CPU", "GPU", "memory"}}
    cpu = group.cpu or str(cpus)
    size = kube.Size(
        cpu=cpu,
        memory=group.memory or f"{_GIB_PER_CPU * cpus}Gi",
        shm=group.shm,
        accelerators=group.accelerators if group.accelerators is not None else ({_GPU: gpus} if gpus else {}),
    )
    return kube.Group(
        name=group.name,
        size=size,
        max_replicas=group.max_replicas or math.ceil(_max_slots(spec) / group.hosts),
        min_replicas=group.min_replicas,
        hosts=group.hosts,
        priority=group.priority,
        capacity=group.capacity,
        drain_s=_drain_s(group, spec),
        idle_timeout_s=group.idle_timeout_s,
        zone=group.zone,
        place=kube.Place(group.node_selector, tuple(group.tolerations)),
        labels=group.labels,
        resources=group.resources if group.resources is not None else custom,
    )


def _max_slots(spec: JobSpec) -> int:
    return spec.sizes[1] // spec.workers_per_slot + spec.spare_slots


def _drain_s(group: GroupSpec, spec: JobSpec) -> int:
    failures = spec.failures
    drain_s = group.drain_s
    if drain_s is None:
        usual = _planned_end_s(spec)
        drain_s = min(usual, SPOT_DRAIN_S) if group.capacity == "spot" else usual
    if drain_s <= failures.drain_margin_s:
        raise UsageError(
            f"group {group.name!r} drains for {drain_s} s, which is not longer than 'failures.drain_margin_s' "
            f"({failures.drain_margin_s:g} s): a run that has to save would have no time for it"
        )
    return drain_s


def _planned_end_s(spec: JobSpec) -> int:
    return math.ceil(spec.failures.drain_timeout_s + spec.failures.drain_margin_s)


def _control_store(store: ControlStoreSpec) -> kube.ControlStore:
    return kube.ControlStore(
        kind=store.kind,
        size=store.size,
        storage_class=store.storage_class,
        address=store.address,
        username=store.username.ref() if store.username else None,
        password=store.password.ref() if store.password else None,
    )


def _network(network: NetworkSpec | None) -> kube.Network | None:
    if network is None:
        return None
    return kube.Network(
        api_server=tuple(item.egress() for item in network.api_server),
        egress=tuple(item.egress() for item in network.egress),
        operator_namespace=network.operator_namespace,
    )


def _check_storage(spec: JobSpec, section: KubernetesSpec) -> None:
    """Raises UsageError for storage that not all pods can reach: the journal and all checkpoints are shared."""
    if spec.storage_url is None:
        raise UsageError("'storage_url' is missing: on Kubernetes a run needs storage that all of its pods can reach")
    mounts = [volume.mount for volume in section.volumes if not volume.read_only]
    given = {"storage_url": spec.storage_url, "checkpoint.url": spec.checkpoint.url}
    for key, url in given.items():
        path = _local_path(url) if url is not None else None
        if path is not None and not any(_is_below(path, mount) for mount in mounts):
            raise UsageError(
                f"{key!r} is {path}, a path of one machine: name an object store (s3://...), or a folder on one of "
                "'kubernetes.volumes', as an absolute path"
            )
    remote = [url for url in given.values() if url is not None and _local_path(url) is None]
    if remote and section.network_policy is not None and not section.network_policy.egress:
        raise UsageError(
            f"'kubernetes.network_policy.egress' is empty, so no pod could reach {remote[0]}: name the addresses "
            "and ports of the storage"
        )


def _local_path(url: str) -> str | None:
    """The path on one machine; None for an address that is reached over the network."""
    protocol, found, path = url.partition("://")
    if not found:
        return url
    return path if protocol in _LOCAL_PROTOCOLS else None


def _is_below(path: str, mount: str) -> bool:
    return posixpath.normpath(path) == mount or posixpath.normpath(path).startswith(f"{mount.rstrip('/')}/")
