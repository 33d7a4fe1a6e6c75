"""The `kubernetes` section of a job file and `elastic kube render`: defaults, refusals, the example rendered."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from elastic_cluster.kube.manifests.job import KubeJob, SecretRef, Size
from elastic_cluster.kube.manifests.render import render
from elastic_jobs.cli import main
from elastic_jobs.commands.kube.render import as_yaml
from elastic_jobs.job_file.kubernetes_section import ControlStoreSpec, GroupSpec, KubernetesSpec, NetworkSpec
from elastic_jobs.job_file.load import load_job
from elastic_jobs.kube.job import SPOT_DRAIN_S, kube_job
from elastic_jobs.submit import driver
from elastic_jobs.submit.driver_command import DriverCommand
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from elastic.core.errors import UsageError

ROOT = Path(__file__).resolve().parents[4]
EXAMPLE = ROOT / "examples" / "kubernetes.yaml"
GOLDEN = ROOT / "tests" / "data" / "kube" / "kubernetes.yaml"

JOB: dict[str, Any] = {
    "name": "gpt",
    "entry_point": "train.py:train",
    "min_workers": 2,
    "max_workers": 8,
    "workers_per_slot": 2,
    "resources_per_worker": {"CPU": 3, "GPU": 1},
    "storage_url": "s3://bucket/runs",
    "kubernetes": {"image": "team/image:1"},
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "train.py").write_text("def train(config): ...\n")
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump({**JOB, **changes}))
    return file


def section(**changes: Any) -> dict[str, Any]:
    return {"kubernetes": {**JOB["kubernetes"], **changes}}


def read(folder: Path, **changes: Any) -> KubeJob:
    file = write(folder, **changes)
    return kube_job(load_job(file), file)


def test_what_is_left_out_is_taken_from_the_job(tmp_path: Path) -> None:
    job = read(tmp_path)
    (workers,) = job.groups
    assert workers.size == Size("6", "24Gi", None, {"nvidia.com/gpu": 2}), "room for one slot"
    assert (workers.min_replicas, workers.max_replicas) == (0, 4)
    assert (job.name, job.run_id, job.namespace, job.min_slots) == ("gpt", "gpt", "default", 1)
    told = ["--run-id", "gpt", "--attempt", "1", "--mode", "continue", "--storage", "s3://bucket/runs"]
    assert list(job.command[:-4]) == ["exec", "python", "-m", "elastic_jobs.submit.driver", "/app/job.yaml", *told]
    assert job.files == {"/app/job.yaml": (tmp_path / "job.yaml").read_text()}
    assert job.idle_timeout_s > job.node_start_s


def test_code_and_deepspeed_configuration_are_those_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    before = read(tmp_path, deepspeed="ds.json")
    assert before.files["/app/ds.json"] == '{"train_batch_size": 8}'
    (tmp_path / "ds.json").write_text('{"train_batch_size": 16}')
    assert read(tmp_path, deepspeed="ds.json").files["/app/ds.json"] == '{"train_batch_size": 16}'
    # An image with other code is refused by the driver.
    command = DriverCommand.of_line(shlex.join(before.command))
    driver.check_code("train.py:train", tmp_path, command.code)
    (tmp_path / "train.py").write_text("def train(config): return 1\n")
    with pytest.raises(UsageError, match="build the image again"):
        driver.check_code("train.py:train", tmp_path, command.code)


@pytest.mark.parametrize(
    ("entry_point", "said"),
    [("gone:train", "there is no such file or module"), ("train.py:tarin", "train.py has no 'tarin'")],
)
def test_an_entry_point_that_submit_refuses_is_not_rendered(tmp_path: Path, entry_point: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(tmp_path, entry_point=entry_point)


def test_what_is_told_on_the_command_line_comes_first(tmp_path: Path) -> None:
    file = write(tmp_path, **section(namespace="a"))
    job = kube_job(load_job(file), file, run_id="other", namespace="b", image="c:1", as_cluster=True)
    assert (job.name, job.run_id, job.namespace, job.image, job.as_cluster) == ("other", "other", "b", "c:1", True)


def test_a_node_drains_for_as_long_as_a_planned_end_may_take_unless_its_notice_is_shorter(tmp_path: Path) -> None:
    groups = [{"name": "a"}, {"name": "b", "capacity": "spot"}, {"name": "c", "drain_s": 100, "capacity": "spot"}]
    job = read(tmp_path, failures={"drain_timeout_s": 50.5, "drain_margin_s": 5.0}, **section(groups=groups))
    assert [group.drain_s for group in job.groups] == [56, SPOT_DRAIN_S, 100]


def test_custom_resources_of_a_slot_are_those_of_a_pod(tmp_path: Path) -> None:
    (group,) = read(tmp_path, resources_per_worker={"CPU": 0.5, "fpga": 1.5}).groups
    assert (dict(group.resources), group.size.cpu) == ({"fpga": 3}, "1")


def test_variables_from_secrets(tmp_path: Path) -> None:
    job = read(tmp_path, **section(env={"A": "b", "C": {"secret": "d", "key": "e"}}))
    assert job.env == {"A": "b", "C": SecretRef("d", "e")}


def test_a_folder_on_a_volume_is_storage(tmp_path: Path) -> None:
    volumes = [{"claim": "shared", "mount": "/shared"}]
    assert read(tmp_path, storage_url="/shared/runs", **section(volumes=volumes)).volumes


GROUPS = [{"name": "a"}]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "My Run"}, "run id 'My Run' cannot be the name of a RayJob"),
        ({"kubernetes": {}}, "no image"),
        ({"storage_url": None}, "'storage_url' is missing"),
        ({"storage_url": "/here/runs"}, "'storage_url' is /here/runs, a path of one machine"),
        ({"storage_url": "file:///here/runs"}, "a path of one machine"),
        ({"storage_url": "memory://runs"}, "is the memory of one process"),
        ({"storage_url": "/sharedx", **section(volumes=[{"claim": "c", "mount": "/shared"}])}, "a path of one machine"),
        ({"storage_url": "/shared", **section(volumes=[{"claim": "c", "mount": "/shared", "read_only": True}])},
         "a path of one machine"),
        ({"checkpoint": {"url": "/here"}}, "'checkpoint.url' is /here"),
        (section(network_policy={"api_server": [{"cidr": "10.0.0.1/32"}]}), "so no pod could reach s3://bucket/runs"),
        (section(groups=[{"name": "a", "drain_s": 10}]), "not longer than 'failures.drain_margin_s' (10 s)"),
        (section(groups=[{"name": "a", "cpu": 1}]), "no room for a slot of the job: a slot wants CPU 6, a pod has 1"),
        (section(groups=[{"name": "a", "max_replicas": 1, "min_replicas": 2}]), "min_replicas (2) is above"),
        (section(groups=[{"name": "a", "tolerations": [{"efect": "x"}]}]), "'efect' was unexpected"),
        (section(env={"HF_TOKEN": "x"}), "env HF_TOKEN looks like a credential"),
        (section(env={"NOTE": "AKIA0123456789ABCDEF"}), "job.yaml line 4 holds what looks like a credential"),
        ({"config": {"api_key": "abcdefgh"}}, "config.api_key looks like a secret"),
        ({"entry_point": "gone.py:train"}, "there is no file"),
        (section(idle_timeout_s=60), "must be longer than node_start_s"),
        ({"deepspeed": {"elasticity": {"enabled": True}}}, "deepspeed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], sentence: str
) -> None:
    file = write(tmp_path, **changes)
    assert main(["kube", "render", str(file), "-o", str(tmp_path / "out.yaml")]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out.yaml").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"imagee": "a"}, "unknown key 'kubernetes.imagee'; did you mean 'image'?"),
        ({"groups": [{"name": "a", "cpus": 2}]}, "unknown key 'kubernetes.groups.0.cpus'; did you mean 'cpu'?"),
        ({"groups": [{"name": "a", "seed": 2}]}, "'seed' belongs at the top level"),
        ({"head": {"cpu": 1, "memory": "1GB"}}, "'1GB' is not a quantity such as 2, 500m or 64Gi"),
        ({"head": {"cpu": 1}}, "the key 'kubernetes.head.memory' is missing"),
        ({"groups": []}, "'kubernetes.groups'"),
        ({"control_store": {"kind": "etcd"}}, "'kubernetes.control_store.kind'"),
        ({"env": {"A": {"secret": "x"}}}, "kubernetes.env.A"),
        ({"backoff_limit": -1}, "'kubernetes.backoff_limit' should be greater than or equal to 0, but is -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_slip_in_the_section_is_named_with_its_line(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=r"job\.yaml line \d+: ") as caught:
        load_job(write(tmp_path, **section(**changes)))
    assert sentence in str(caught.value)


def test_an_image_key_at_the_top_level_is_told_where_it_belongs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'image' belongs under 'kubernetes'"):
        load_job(write(tmp_path, image="a"))


def test_the_example_is_rendered_as_it_was() -> None:
    job = kube_job(load_job(EXAMPLE), EXAMPLE)
    # Versions of this installation and the digest of the code are in it.
    job = replace(job, ray_version="2.60.0", command=(*job.command[:-3], "0.1.0", "--code", "0" * 64))
    assert as_yaml(render(job)) == GOLDEN.read_text(), f"if this is meant: write it to {GOLDEN}"


def test_data_on_stdout_talk_on_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path)
    assert main(["kube", "render", str(file)]) == 0
    out, err = capfd.readouterr()
    manifests = list(yaml.safe_load_all(out))
    assert [manifest["kind"] for manifest in manifests] == ["ConfigMap", "RayJob"]
    assert err.splitlines()[-1] == f"Next: elastic kube apply {file} --dry-run"

    assert main(["kube", "render", str(file), "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"run_id": "gpt", "manifests": manifests}

    target = tmp_path / "out.yaml"
    assert main(["kube", "render", str(file), "-o", str(target)]) == 0
    written, err = capfd.readouterr()
    assert written == ""
    assert list(yaml.safe_load_all(target.read_text())) == manifests
    assert err.splitlines()[-1] == f"Next: elastic kube apply {target} --dry-run"

    assert main(["kube", "render", str(file), "--cluster", "--namespace", "other"]) == 0
    out, err = capfd.readouterr()
    assert err.splitlines()[-1] == f"Next: elastic kube apply {file} --namespace other --cluster --dry-run"
    (cluster,) = yaml.safe_load_all(out)
    assert (cluster["kind"], cluster["metadata"]["namespace"]) == ("RayCluster", "other")


def test_a_file_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["kube", "render", str(write(tmp_path)), "-o", str(tmp_path / "no" / "out.yaml")]) == 2
    assert "cannot be written: No such file or directory" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "train.py"]


def test_what_the_operator_must_have_switched_on_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["kube", "render", str(write(tmp_path, **section(control_store={"kind": "rocksdb"})))]) == 0
    assert "GCSFaultToleranceEmbeddedStorage" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("title", "model"),
    [
        ("kubernetes", KubernetesSpec),
        ("groups", GroupSpec),
        ("control_store", ControlStoreSpec),
        ("network_policy", NetworkSpec),
    ],
)
def test_every_key_is_explained_with_its_default(title: str, model: type[BaseModel]) -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text().partition(f"\n### {title}\n")[2].partition("\n##")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE))
    assert told == {name: default(field) for name, field in model.model_fields.items()}


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or (isinstance(value, list) and value):
        return "see below"
    return "none" if value is None else f"`{json.dumps(value)}`"


def test_the_image_has_the_user_that_pods_run_as_and_names_no_host() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    user = KubernetesSpec.model_fields["run_as_user"].default
    assert lines[-1] == f"USER {user}"
    assert any(f"--uid {user} " in line for line in lines)
    assert not [line for line in lines if re.search(r"://|\.(com|org|io)/", line)]
    copied = [line.split()[-2] for line in lines if line.startswith("COPY ") and "$" not in line]
    assert [name for name in copied if not (ROOT / name).exists()] == []
