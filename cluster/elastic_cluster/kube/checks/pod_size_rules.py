"""Whether pods are as large as they say, and a slot of the job fits into one. Rules as in `refuse`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal

from elastic_cluster.kube.manifests import names, pods, quantity
from elastic_cluster.kube.manifests.job import Group, KubeJob, Size

Sentences = Iterator[str]

# What KubeRay calls them to Ray. Of several kinds in one pod it takes the first by name.
_GPU = re.compile(r"gpu$|nvidia\.com/mig-\d+g\.\d+gb$")
_OTHER_DEVICES = {"aws.amazon.com/neuroncore": "neuron_cores", "google.com/tpu": "TPU"}


def sizes(job: KubeJob) -> Sentences:
    for where, size in _all_sizes(job):
        for key, text in (("cpu", size.cpu), ("memory", size.memory), ("shm", size.shm)):
            if text is None:
                continue
            try:
                if quantity.parse(text) <= 0:
                    yield f"{where}: {key} is {text}, and must be more than nothing"
            except ValueError as error:
                yield f"{where}: {key}: {error}"
        for device, count in size.accelerators.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                yield f"{where}: {count} of {device}: devices are given to pods as a whole, in whole numbers from 1"
            if "/" not in device or not names.is_label_key(device):
                yield f"{where}: {device!r} is not the name of a device such as nvidia.com/gpu"


def _all_sizes(job: KubeJob) -> list[tuple[str, Size]]:
    groups = [(f"group {group.name!r}", group.size) for group in job.groups]
    return [("head", job.head), ("controller", job.controller), *groups]


def shared_memory(job: KubeJob) -> Sentences:
    # Ray does not start with an object store of less.
    least = 128 * 1024**2
    for where, size in _all_sizes(job):
        shm, memory = pods.shm_bytes(size), quantity.whole(size.memory)
        if shm >= memory:
            yield f"{where}: shm ({size.shm}) is part of the pod's memory ({size.memory}) and must leave room in it"
        elif pods.object_store_bytes(size) < least:
            yield (
                f"{where}: /dev/shm of {shm // 1024**2} MiB is too small for Ray's object store, which takes three "
                f"quarters of it and needs {least // 1024**2} MiB: give it more 'shm' or more 'memory'"
            )


def room(job: KubeJob) -> Sentences:
    slots = 0
    for group in job.groups:
        short = _short(group, job.slot)
        if short:
            yield f"group {group.name!r} has no room for a slot of the job: {', '.join(short)}"
        else:
            slots += group.max_replicas * group.hosts * _slots_per_pod(group, job.slot)
    if slots < job.min_slots:
        yield f"all groups together have room for {slots} slots at most; the run does not start below {job.min_slots}"


def offers(group: Group) -> dict[str, Decimal]:
    """What Ray sees on one pod of the group, as KubeRay and Ray's autoscaler work it out."""
    found = {"CPU": Decimal(quantity.whole(group.size.cpu)), "memory": quantity.parse(group.size.memory)}
    for device, count in sorted(group.size.accelerators.items()):
        name = "GPU" if _GPU.search(device) else _OTHER_DEVICES.get(device)
        if name is not None:
            found.setdefault(name, Decimal(count))
    return {**found, **{name: Decimal(count) for name, count in group.resources.items()}}


def _short(group: Group, slot: Mapping[str, float]) -> list[str]:
    has = offers(group)
    wanted = {name: Decimal(str(amount)) for name, amount in slot.items()}
    return [
        f"a slot wants {name} {_plain(amount)}, a pod has {_plain(has.get(name, Decimal(0)))}"
        for name, amount in sorted(wanted.items())
        if amount > has.get(name, Decimal(0))
    ]


def _plain(number: Decimal) -> str:
    """Without an exponent or zeros at its end: "4", "0.5", "68719476736"."""
    return f"{number:f}".rstrip("0").rstrip(".") if "." in f"{number:f}" else f"{number:f}"


def _slots_per_pod(group: Group, slot: Mapping[str, float]) -> int:
    has = offers(group)
    return min((math.floor(has[name] / Decimal(str(amount))) for name, amount in slot.items() if amount), default=1)
