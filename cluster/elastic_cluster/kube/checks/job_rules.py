"""What is wrong with a job before anything is rendered: each rule is a function from the job to sentences."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator

from elastic_cluster.kube.checks import pod_size_rules
from elastic_cluster.kube.manifests import names, pods, quantity
from elastic_cluster.kube.manifests.job import KubeJob, SecretRef

# Words of a variable's name that say that its value is a credential.
_CREDENTIAL = {
    "KEY", "KEYS", "APIKEY", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL",
    "CREDENTIALS",
}  # fmt: skip
_WITH_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]*:[^/?#@\s]+@", re.IGNORECASE)
_FILE_KEY = re.compile(r"[-._A-Za-z0-9]{1,253}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Set by KubeRay or by the renderer; a second variable of the same name would silently win.
_RESERVED = {
    "FQ_RAY_IP",
    "KUBERAY_GEN_RAY_START_CMD",
    "RAY_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_CLOUD_INSTANCE_ID",
    "RAY_CLUSTER_NAME",
    "RAY_CLUSTER_NAMESPACE",
    "RAY_IP",
    "RAY_NODE_REGION",
    "RAY_NODE_TYPE_NAME",
    "RAY_NODE_ZONE",
    "RAY_PORT",
    "RAY_REDIS_ADDRESS",
    "RAY_enable_autoscaler_v2",
    "RAY_external_storage_namespace",
    "RAY_gcs_storage",
    "RAY_gcs_storage_path",
    "REDIS_PASSWORD",
    "REDIS_USERNAME",
    names.DRAIN_VARIABLE,
}
# The rest of a Workload's eight pod sets are the head and, of a RayJob, the submitter.
_KUEUE_POD_SETS = 8
_CONFIG_MAP_BYTES = 1024 * 1024

Sentences = Iterator[str]


def refusals(job: KubeJob) -> list[str]:
    """One sentence for each thing that Kubernetes, KubeRay or the run would not take; empty when all is well."""
    found: list[str] = []
    for rule in RULES:
        found += rule(job)
        # Later rules take earlier ones for granted: what a quantity is, say.
        if found:
            break
    return found


def _names(job: KubeJob) -> Sentences:
    if not names.is_name(job.name):
        yield (
            f"name {job.name!r} must be lower-case letters, digits and '-', begin with a letter and have "
            f"{names.LONGEST_NAME} characters at most: try {names.dns_label(job.name)!r}"
        )
    if not names.is_label_value(job.run_id) or not job.run_id:
        yield f"run id {job.run_id!r} is not a label's value: letters, digits, '-', '_' and '.', 63 at most"
    if not names.is_dns_label(job.namespace):
        yield f"namespace {job.namespace!r} must be lower-case letters, digits and '-', 63 at most"
    if job.queue is not None and not (names.is_label_value(job.queue) and job.queue):
        yield f"queue {job.queue!r} is not the name of a Kueue queue: letters, digits, '-', '_' and '.', 63 at most"
    secrets = [("token_secret", job.token_secret), ("service_account", job.service_account)]
    secrets += [("pull_secrets", name) for name in job.pull_secrets]
    claims = [("volumes", volume.claim) for volume in job.volumes]
    for key, name in [*secrets, *claims, *(("env", ref.name) for ref in _refs(job))]:
        if name is not None and not names.is_dns_name(name):
            yield f"{key}: {name!r} is not a name: lower-case letters, digits, '-' and '.', 253 at most"


def _refs(job: KubeJob) -> list[SecretRef]:
    found = [value for value in job.env.values() if isinstance(value, SecretRef)]
    return found + [ref for ref in (job.control_store.username, job.control_store.password) if ref is not None]


def _image(job: KubeJob) -> Sentences:
    if not job.image or re.search(r"\s", job.image):
        yield f"image {job.image!r} is not the name of an image"


def _group_names(job: KubeJob) -> Sentences:
    if not job.groups:
        yield "there is no worker group"
    for name, times in Counter(group.name for group in job.groups).items():
        if times > 1:
            yield f"group {name!r} is given {times} times"
        if not names.is_dns_label(name):
            yield f"group {name!r}: a group's name is lower-case letters, digits and '-', 63 at most"
        if name in {names.HEAD_GROUP, names.CONTROLLER_GROUP}:
            yield f"group {name!r}: that name is taken, for the pod of the {name.removesuffix('group')}"
    groups = len(job.groups) + 1
    fixed = 1 if job.as_cluster else 2
    if job.queue is not None and groups + fixed > _KUEUE_POD_SETS:
        most = _KUEUE_POD_SETS - fixed - 1
        yield f"{len(job.groups)} groups are more than Kueue can queue as one workload, which is {most}"


def _group_counts(job: KubeJob) -> Sentences:
    for group in job.groups:
        where = f"group {group.name!r}"
        if group.min_replicas < 0 or group.max_replicas < 1 or group.hosts < 1:
            yield f"{where}: max_replicas and hosts must be at least 1, and min_replicas at least 0"
        if group.min_replicas > group.max_replicas:
            yield f"{where}: min_replicas ({group.min_replicas}) is above max_replicas ({group.max_replicas})"
        for key, value in group.labels.items():
            if not names.is_label_key(key) or not names.is_label_value(value):
                yield f"{where}: {key}={value} is not a label"


def _times(job: KubeJob) -> Sentences:
    idle = [("idle_timeout_s", job.idle_timeout_s)]
    idle += [(f"group {g.name!r}: idle_timeout_s", g.idle_timeout_s) for g in job.groups if g.idle_timeout_s]
    for where, value in idle:
        if value <= job.node_start_s:
            yield (
                f"{where} ({value}) must be longer than node_start_s ({job.node_start_s}): the first nodes of a slot "
                "would be given back while the others are still starting"
            )
    for group in job.groups:
        if group.drain_s < 1:
            yield f"group {group.name!r}: drain_s must be at least 1, or the run would hear of nothing beforehand"


def _environment(job: KubeJob) -> Sentences:
    for name, value in job.env.items():
        if not _VARIABLE.fullmatch(name):
            yield f"env {name!r} is not the name of a variable"
        elif name in _RESERVED:
            yield f"env {name} is set by KubeRay or by `elastic kube render`; leave it out"
        elif isinstance(value, str) and (_CREDENTIAL & _words(name) or _WITH_PASSWORD.search(value)):
            yield (
                f"env {name} looks like a credential and would stand in the manifest for all to read: put it into a "
                "Secret and write {secret: NAME, key: KEY} instead of the value"
            )


def _words(name: str) -> set[str]:
    """Of "HF_TOKEN" and of "hfToken"."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper().split("_"))


def _files(job: KubeJob) -> Sentences:
    if sum(len(text.encode()) for text in job.files.values()) > _CONFIG_MAP_BYTES - 4096:
        yield "the job file is larger than a ConfigMap can be (1 MiB)"
    keys = Counter(pods.file_key(path) for path in job.files)
    for key, times in keys.items():
        if times > 1 or not _FILE_KEY.fullmatch(key):
            yield f"paths of files in the pods are letters, digits, '-', '_', '.' and '/', not {list(job.files)}"
    mounts = [volume.mount for volume in job.volumes]
    for mount in [*mounts, *job.files]:
        if not mount.startswith("/") or ".." in mount.split("/") or ":" in mount:
            yield f"{mount!r} is not an absolute path in a pod"
    for mount, times in Counter([*mounts, "/dev/shm", "/data/gcs", "/tmp/ray"]).items():
        if times > 1:
            yield f"volumes: {mount} is mounted twice"


def _store(job: KubeJob) -> Sentences:
    store = job.control_store
    if store.kind == "redis":
        host, _, port = (store.address or "").rpartition(":")
        if not host or not port.isdigit():
            yield f"control_store: redis needs an 'address' of the form host:port, not {store.address!r}"
        elif _WITH_PASSWORD.search(store.address or ""):
            yield "control_store: the address holds a password; give it by 'password: {secret: NAME, key: KEY}'"
    elif store.address or store.username or store.password:
        yield f"control_store: address, username and password are redis's; the kind is {store.kind!r}"
    if store.kind == "rocksdb":
        try:
            quantity.parse(store.size)
        except ValueError as error:
            yield f"control_store: size: {error}"


def _network(job: KubeJob) -> Sentences:
    if job.network is None:
        return
    for egress in [*job.network.api_server, *job.network.egress]:
        try:
            ipaddress.ip_network(egress.cidr)
        except ValueError as error:
            yield f"network_policy: {error}"
        if any(not 0 < port < 65536 for port in egress.ports):
            yield f"network_policy: {egress.cidr}: ports are from 1 to 65535"
    store = job.control_store
    ports = {port for egress in job.network.egress for port in egress.ports}
    if store.kind == "redis" and int((store.address or ":0").rpartition(":")[2]) not in ports:
        yield f"network_policy: nothing in 'egress' lets the head reach redis at {store.address}"


RULES: tuple[Callable[[KubeJob], Sentences], ...] = (
    _names,
    _image,
    _group_names,
    _group_counts,
    pod_size_rules.sizes,
    pod_size_rules.shared_memory,
    pod_size_rules.room,
    _times,
    _environment,
    _files,
    _store,
    _network,
)
