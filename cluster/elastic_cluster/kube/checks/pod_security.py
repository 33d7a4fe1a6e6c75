"""Kubernetes's Pod Security Standard `restricted`, for every pod that is described: head, workers, submitter.

The containers that KubeRay adds take over the Ray container's security context (the one that waits for the control
store) or have one of their own in the autoscaler's options, which is looked at as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from elastic_cluster.kube.checks.walk import Json, Template, cluster_of, templates

Sentences = Iterator[str]

_VOLUME_KINDS = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
_SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}  # fmt: skip
_PROFILES = {"RuntimeDefault", "Localhost"}


def host(template: Template) -> Sentences:
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if template.spec.get(key):
            yield f"{template.path}.spec.{key}: shares the machine's own"
    for path, container in template.containers:
        for port in container.get("ports") or []:
            if port.get("hostPort"):
                yield f"{path}.ports: hostPort {port['hostPort']} is one of the machine's"


def volumes(template: Template) -> Sentences:
    for index, volume in enumerate(template.spec.get("volumes") or []):
        for kind in volume.keys() - {"name"} - _VOLUME_KINDS:
            yield f"{template.path}.spec.volumes[{index}].{kind}: is no kind of volume that a restricted pod may have"


def privileged(template: Template) -> Sentences:
    for path, security in _contexts(template):
        if security.get("privileged"):
            yield f"{path}.privileged: must not be set"
        if security.get("procMount") not in (None, "Default"):
            yield f"{path}.procMount: must be the default"


def escalation(template: Template) -> Sentences:
    for path, security in _contexts(template):
        if security.get("allowPrivilegeEscalation") is not False:
            yield f"{path}.allowPrivilegeEscalation: must be false"


def capabilities(template: Template) -> Sentences:
    for path, security in _contexts(template):
        capabilities = security.get("capabilities") or {}
        if "ALL" not in (capabilities.get("drop") or []):
            yield f"{path}.capabilities.drop: must have ALL"
        if set(capabilities.get("add") or []) - {"NET_BIND_SERVICE"}:
            yield f"{path}.capabilities.add: only NET_BIND_SERVICE may be added"


def not_root(template: Template) -> Sentences:
    pod = template.spec.get("securityContext") or {}
    for path, security in _contexts(template):
        if security.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
            yield f"{path}.runAsNonRoot: must be true, here or for the pod"
        if security.get("runAsUser", pod.get("runAsUser")) == 0:
            yield f"{path}.runAsUser: must not be 0, which is root"


def seccomp(template: Template) -> Sentences:
    pod = template.spec.get("securityContext") or {}
    for path, security in _contexts(template):
        profile = security.get("seccompProfile") or pod.get("seccompProfile") or {}
        if profile.get("type") not in _PROFILES:
            yield f"{path}.seccompProfile.type: must be RuntimeDefault or Localhost"


def kernel(template: Template) -> Sentences:
    pod = template.spec.get("securityContext") or {}
    for sysctl in pod.get("sysctls") or []:
        if sysctl.get("name") not in _SAFE_SYSCTLS:
            yield f"{template.path}.spec.securityContext.sysctls: {sysctl.get('name')} is not a safe one"
    everywhere = [(f"{template.path}.spec.securityContext", pod), *_contexts(template)]
    for path, security in everywhere:
        if (security.get("appArmorProfile") or {}).get("type", "RuntimeDefault") not in _PROFILES:
            yield f"{path}.appArmorProfile.type: must be RuntimeDefault or Localhost"
        options = security.get("seLinuxOptions") or {}
        types = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
        if options.get("type") not in types or options.get("user") or options.get("role"):
            yield f"{path}.seLinuxOptions: neither user nor role, and only a container's type"
        if (security.get("windowsOptions") or {}).get("hostProcess"):
            yield f"{path}.windowsOptions.hostProcess: must not be set"


RULES: tuple[Callable[[Template], Sentences], ...] = (
    host, volumes, privileged, escalation, capabilities, not_root, seccomp, kernel,
)  # fmt: skip


def problems(manifest: Json) -> Sentences:
    for template in [*templates(manifest), *_autoscaler(manifest)]:
        for rule in RULES:
            yield from rule(template)


def _contexts(template: Template) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{path}.securityContext", container.get("securityContext") or {}) for path, container in template.containers
    ]


def _autoscaler(manifest: Json) -> Iterator[Template]:
    """KubeRay puts it into the head's pod; what it may do is in the options."""
    found = cluster_of(manifest)
    if found is None or not found[1].get("enableInTreeAutoscaling"):
        return
    path, spec = found
    options = spec.get("autoscalerOptions") or {}
    pod = next((t.spec for t in templates(manifest) if t.role == "head"), {})
    container = {"name": "autoscaler", "securityContext": options.get("securityContext") or {}}
    shown = {"securityContext": pod.get("securityContext") or {}, "containers": [container]}
    yield Template(f"{path}.autoscalerOptions", "autoscaler", options, shown)
