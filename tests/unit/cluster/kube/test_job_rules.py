"""A job that cannot be is refused in one sentence before anything is rendered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from elastic_cluster.kube.checks.job_rules import refusals
from elastic_cluster.kube.checks.pod_size_rules import offers
from elastic_cluster.kube.manifests import names, quantity
from elastic_cluster.kube.manifests.job import ControlStore, Egress, Group, KubeJob, Network, SecretRef, Size, Volume
from hypothesis import given
from hypothesis import strategies as st
from kube_jobs import sample


def group(**changes: Any) -> dict[str, Any]:
    """The sample with its first group changed."""
    return {"groups": (replace(sample().groups[0], **changes),)}


def size(**changes: Any) -> dict[str, Any]:
    return group(size=replace(sample().groups[0].size, **changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "My_Run"}, "try 'my-run'"),
        ({"name": "g" * 48}, "47 characters at most"),
        ({"name": "7b"}, "try 'run-7b'"),
        ({"run_id": "a b"}, "run id 'a b' is not a label's value"),
        ({"namespace": "Team"}, "namespace 'Team'"),
        ({"queue": ""}, "queue ''"),
        ({"token_secret": "A"}, "token_secret: 'A' is not a name"),
        ({"service_account": "a b"}, "service_account: 'a b' is not a name"),
        ({"env": {"A": SecretRef("a b", "c")}}, "env: 'a b' is not a name"),
        ({"image": ""}, "image ''"),
        ({"image": "a b"}, "image 'a b'"),
        ({"groups": ()}, "there is no worker group"),
        ({"groups": sample().groups[:1] * 2}, "group 'spot' is given 2 times"),
        (group(name="controller"), "that name is taken"),
        (group(name="headgroup"), "that name is taken"),
        (group(name="Spot"), "group 'Spot'"),
        ({"groups": tuple(replace(sample().groups[0], name=f"g{n}") for n in range(6))}, "which is 5"),
        (group(min_replicas=9), "min_replicas (9) is above max_replicas (8)"),
        (group(max_replicas=0), "must be at least 1"),
        (group(hosts=0), "must be at least 1"),
        (group(labels={"a b": "c"}), "a b=c is not a label"),
        (size(memory="64GB"), "memory: '64GB' is not a quantity such as 2, 500m or 64Gi"),
        (size(cpu="0"), "must be more than nothing"),
        (size(cpu="-1"), "'-1' is not a quantity"),
        (size(accelerators={"nvidia.com/gpu": 0.5}), "0.5 of nvidia.com/gpu: devices are given to pods as a whole"),
        (size(accelerators={"nvidia.com/gpu": "500m"}), "500m of nvidia.com/gpu: devices are given"),
        (size(accelerators={"nvidia.com/gpu": 0}), "whole numbers from 1"),
        (size(accelerators={"gpu": 2}), "'gpu' is not the name of a device"),
        (size(shm="64Gi"), "must leave room in it"),
        (size(shm="100Mi"), "too small for Ray's object store"),
        ({"head": Size("1", "500Mi")}, "head: /dev/shm of 125 MiB is too small"),
        (size(cpu="3"), "group 'spot' has no room for a slot of the job: a slot wants CPU 4, a pod has 3"),
        (size(accelerators={}), "a slot wants GPU 2, a pod has 0"),
        ({"slot": {"fpga": 1.0}}, "a slot wants fpga 1, a pod has 0"),
        ({"slot": {"memory": 1e12}}, "a slot wants memory"),
        ({"min_slots": 17}, "room for 16 slots at most; the run does not start below 17"),
        ({"idle_timeout_s": 300}, "idle_timeout_s (300) must be longer than node_start_s (300)"),
        (group(idle_timeout_s=10), "group 'spot': idle_timeout_s (10) must be longer"),
        (group(drain_s=0), "drain_s must be at least 1"),
        ({"env": {"HF_TOKEN": "x"}}, "env HF_TOKEN looks like a credential"),
        ({"env": {"AWS_SECRET_ACCESS_KEY": "x"}}, "looks like a credential"),
        ({"env": {"db_password": "x"}}, "looks like a credential"),
        ({"env": {"hfToken": "x"}}, "looks like a credential"),
        ({"env": {"MY_PASSPHRASE": "x"}}, "looks like a credential"),
        ({"env": {"TRACKER": "https://me:word@host/"}}, "looks like a credential"),
        ({"env": {"A-B": "x"}}, "not the name of a variable"),
        ({"env": {"RAY_AUTH_TOKEN": SecretRef("a", "b")}}, "is set by KubeRay or by `elastic kube render`"),
        ({"files": {"/app/job.yaml": "x" * 1024 * 1024}}, "larger than a ConfigMap can be"),
        ({"files": {"app/job.yaml": ""}}, "not an absolute path"),
        ({"files": {"/app/my job.yaml": ""}}, "paths of files in the pods are letters"),
        ({"volumes": (Volume("a", "/a"), Volume("b", "/a"))}, "/a is mounted twice"),
        ({"volumes": (Volume("a", "/dev/shm"),)}, "/dev/shm is mounted twice"),
        ({"volumes": (Volume("a", "/a/../b"),)}, "not an absolute path"),
        ({"control_store": ControlStore("redis")}, "needs an 'address' of the form host:port, not None"),
        ({"control_store": ControlStore("redis", address="redis://:word@r:6379")}, "the address holds a password"),
        ({"control_store": ControlStore("rocksdb", size="big")}, "control_store: size: 'big'"),
        ({"control_store": ControlStore("rocksdb", address="r:1")}, "are redis's; the kind is 'rocksdb'"),
        ({"network": Network((Egress("10.0.0.1/8"),))}, "network_policy: 10.0.0.1/8 has host bits set"),
        ({"network": Network((Egress("10.0.0.0/8", (0,)),))}, "ports are from 1 to 65535"),
        ({"network": Network((Egress("10.0.0.0/8"),))}, "nothing in 'egress' lets the head reach redis"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    found = refusals(sample(**changes))
    assert sentence in found[0]
    assert "\n" not in found[0]


def test_the_sample_itself_is_taken() -> None:
    assert refusals(sample()) == []


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY_PATCH", "MAX_TOKENS", "SECRETARY"])
def test_words_that_only_look_alike(name: str) -> None:
    assert refusals(sample(env={name: "1"})) == []


def test_what_ray_sees_of_a_pod() -> None:
    devices = {"nvidia.com/mig-1g.5gb": 3, "google.com/tpu": 4}
    pod = Group("g", Size("1500m", "1Gi", None, devices), 1, resources={"fpga": 2})
    assert offers(pod) == {"CPU": 2, "memory": 2**30, "GPU": 3, "TPU": 4, "fpga": 2}


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2), (2, 2), ("500m", 0.5), ("1Ki", 1024), ("64Gi", 64 * 2**30), ("1.5G", 1.5e9), ("2e3", 2000), (".5", 0.5)],
)
def test_quantities(text: str | int, value: float) -> None:
    assert float(quantity.parse(text)) == value


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1gi", "0x1", "1e", "inf", "nan", "-2", "1KiB", "1e9999"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity.parse(text)


@given(st.text(max_size=80))
def test_a_name_that_is_proposed_is_taken(text: str) -> None:
    assert names.is_name(names.dns_label(text))


@given(st.text(max_size=60))
def test_any_name_is_taken_or_refused_with_a_proposal(text: str) -> None:
    job = KubeJob(**{**vars(sample()), "name": text})
    assert names.is_name(text) or refusals(job)[0].endswith(repr(names.dns_label(text)))
