"""Jobs for the tests of `elastic_cluster.kube`: one that has everything, and a strategy of valid ones."""

from __future__ import annotations

from typing import Any

from elastic_cluster.kube.manifests.job import (
    ControlStore,
    Egress,
    Group,
    KubeJob,
    Network,
    Place,
    SecretRef,
    Size,
    Volume,
)
from hypothesis import strategies as st


def sample(**changes: Any) -> KubeJob:
    """With every part that can be asked for; `changes` are fields of KubeJob."""
    groups = (
        Group(
            "spot", Size("8", "64Gi", "16Gi", {"nvidia.com/gpu": 2}), 8, capacity="spot", priority=10, drain_s=25,
            place=Place({"pool": "spot"}, ({"key": "spot", "operator": "Exists", "effect": "NoSchedule"},)),
        ),
        Group("steady", Size("8", "64Gi", None, {"nvidia.com/gpu": 2}), 4, min_replicas=1, hosts=2, zone="eu-west-1a"),
    )  # fmt: skip
    fields: dict[str, Any] = {
        "name": "gpt",
        "run_id": "gpt",
        "namespace": "team",
        "image": "team/ray-elastic:1",
        "ray_version": "2.60.0",
        "command": ("exec", "python", "-m", "driver", "/app/job.yaml"),
        "groups": groups,
        "slot": {"CPU": 4.0, "GPU": 2.0},
        "min_slots": 2,
        "files": {"/app/job.yaml": "name: gpt\n"},
        "env": {"LOG_LEVEL": "info", "AWS_SECRET_ACCESS_KEY": SecretRef("s3", "secret")},
        "volumes": (Volume("data", "/data"),),
        "control_store": ControlStore("redis", address="redis:6379", password=SecretRef("redis", "password")),
        "rbac": True,
        "network": Network((Egress("10.96.0.1/32"),), (Egress("10.0.0.0/8", (443, 6379)),)),
        "queue": "training",
    }
    return KubeJob(**{**fields, **changes})


_labels = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
_secrets = st.builds(SecretRef, _labels, _labels)
_places = st.builds(
    Place,
    st.dictionaries(_labels, _labels, max_size=2),
    st.lists(st.fixed_dictionaries({"key": _labels, "operator": st.just("Exists")}), max_size=2).map(tuple),
)
_stores = st.one_of(
    st.just(ControlStore()),
    st.builds(ControlStore, st.just("rocksdb"), size=st.sampled_from(["1Gi", "500M", "2e9"])),
    st.builds(
        ControlStore,
        st.just("redis"),
        address=st.just("redis.team.svc:6379"),
        username=st.none() | _secrets,
        password=st.none() | _secrets,
    ),
)
_egress = st.builds(Egress, st.sampled_from(["10.0.0.0/8", "192.168.1.7/32", "2001:db8::/32"]), st.just((443, 6379)))
_env = st.dictionaries(
    st.from_regex(r"[A-Z]{3,8}_[A-Z]{3,8}", fullmatch=True).filter(lambda n: not n.startswith(("RAY_", "REDIS_"))),
    _secrets | st.text("abc {}$'\"\n", max_size=12),
    max_size=3,
).map(lambda env: {n: v for n, v in env.items() if isinstance(v, SecretRef) or not _credential(n)})


def _credential(name: str) -> bool:
    return name.split("_")[1] in {"KEY", "KEYS", "TOKEN", "SECRET", "SECRETS", "APIKEY", "PASSWORD", "PASSWD"}


@st.composite
def _groups(draw: st.DrawFn, name: str) -> Group:
    low = draw(st.integers(0, 3))
    memory = draw(st.sampled_from(["2Gi", "64Gi", "17179869184", "3e9"]))
    return Group(
        name=name,
        size=Size(
            cpu=draw(st.sampled_from(["2", "3500m", "64"])),
            memory=memory,
            shm=draw(st.sampled_from([None, "512Mi", "1G"])),
            accelerators=draw(st.sampled_from([{}, {"nvidia.com/gpu": 8}, {"google.com/tpu": 4}])),
        ),
        max_replicas=low + draw(st.integers(1, 5)),
        min_replicas=low,
        hosts=draw(st.integers(1, 4)),
        priority=draw(st.integers(-5, 100)),
        capacity=draw(st.sampled_from(["on-demand", "spot"])),
        drain_s=draw(st.integers(1, 600)),
        idle_timeout_s=draw(st.none() | st.integers(601, 4000)),
        zone=draw(st.none() | _labels),
        place=draw(_places),
        labels=draw(st.dictionaries(_labels, _labels, max_size=2)),
        resources=draw(st.dictionaries(st.sampled_from(["fpga", "licence"]), st.integers(1, 9), max_size=1)),
    )


@st.composite
def jobs(draw: st.DrawFn) -> KubeJob:
    """Everything that a user may ask for in any combination that is valid."""
    names = draw(
        st.lists(_labels.filter(lambda n: n not in {"controller", "headgroup"}), min_size=1, max_size=4, unique=True)
    )
    name = draw(st.from_regex(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?", fullmatch=True))
    return KubeJob(
        name=name,
        run_id=name,
        namespace=draw(_labels),
        image="team/ray-elastic:1",
        ray_version="2.60.0",
        command=("exec", "python", "/app/it's a job.yaml", "--run-id", name),
        groups=tuple(draw(_groups(group)) for group in names),
        as_cluster=draw(st.booleans()),
        slot={"CPU": draw(st.sampled_from([0.5, 1.0, 2.0]))},
        min_slots=draw(st.integers(1, len(names))),
        files=draw(st.sampled_from([{}, {"/app/job.yaml": "name: gpt\n# two lines\n"}])),
        env=draw(_env),
        volumes=draw(st.sampled_from([(), (Volume("data", "/data", True), Volume("out", "/out"))])),
        head_place=draw(_places),
        controller_place=draw(_places),
        control_store=draw(_stores),
        node_start_s=draw(st.integers(1, 600)),
        idle_timeout_s=draw(st.integers(601, 2000)),
        service_account=draw(st.none() | _labels),
        stop_s=draw(st.integers(1, 900)),
        token_secret=draw(st.none() | _labels),
        backoff_limit=draw(st.integers(0, 9)),
        ttl_s=draw(st.integers(0, 9)),
        deadline_s=draw(st.none() | st.integers(1, 9)),
        run_as_user=draw(st.integers(1, 65000)),
        pull_policy=draw(st.sampled_from(["Always", "IfNotPresent", "Never"])),
        pull_secrets=draw(st.sampled_from([(), ("registry",)])),
        rbac=draw(st.booleans()),
        network=draw(st.none() | st.builds(Network, st.tuples(_egress), st.tuples(_egress), st.none() | _labels)),
        queue=draw(st.none() | _labels),
    )
