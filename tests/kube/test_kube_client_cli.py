"""`elastic kube` from the command line: exit codes, streams, the next command, and no secret in either stream."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from elastic_cluster.kube.client import status as words
from elastic_cluster.kube.client.errors import KubeError, KubeNotFound, KubeQuota, KubeRefused
from elastic_cluster.kube.client.status import RunStatus
from elastic_jobs import cli
from elastic_jobs.kube.session import result, translated
from kube_fake import FakeKubeRay, FakeKubernetes
from kube_samples import network_policy, ray_job

JOB = """
name: gpt
entry_point: train.py:main
min_workers: 1
max_workers: 4
max_steps: 10
resources_per_worker: {CPU: 2}
storage_url: s3://bucket/runs
kubernetes:
  groups: [{name: workers, memory: 8Gi}]
"""


class World:
    def __init__(self, kubernetes: FakeKubernetes, capfd: pytest.CaptureFixture[str]) -> None:
        self.kubernetes, self.operator = kubernetes, FakeKubeRay(kubernetes)
        self._capfd = capfd

    def elastic(self, *arguments: str) -> tuple[int, list[str], list[str]]:
        """Exit code, lines of stdout, lines of stderr."""
        code = cli.main(["kube", *arguments])
        captured = self._capfd.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[World]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with FakeKubernetes() as kubernetes:
        Path("config").write_text(kubernetes.kubeconfig())
        Path("run.yaml").write_text(yaml.safe_dump_all([ray_job(), network_policy()]))
        yield World(kubernetes, capfd)


def test_from_apply_to_delete(world: World) -> None:
    assert world.elastic("apply", "run.yaml") == (
        0,
        ["Secret/gpt-token created", "NetworkPolicy/gpt created", "RayJob/gpt created"],
        ["run gpt is applied. Next: elastic kube logs gpt -f"],
    )
    pod = world.operator.run("gpt")
    code, out, err = world.elastic("status", "gpt", "--namespace", "team", "--context", "test")
    assert (code, out[0]) == (101, "run gpt (RayJob gpt in team) is running")
    assert err == ["Next: elastic kube logs gpt -f --namespace team --context test"]
    log = world.kubernetes.log("team", pod, "ray-job-submitter")
    log.write("2026-01-01T00:00:01Z step 1", "2026-01-01T00:00:01Z \x1b[31mstep 2")
    log.end()
    world.operator.end_pod(pod)
    world.operator.finish("gpt", "FAILED", "Job entrypoint command failed with exit code 104, last available logs:\nx")
    code, out, err = world.elastic("logs", "gpt", "-f")
    assert (code, out) == (104, ["step 1", " [31mstep 2"])
    assert err == [
        "run gpt is failed: Job entrypoint command failed with exit code 104",
        "Next: elastic kube delete gpt",
    ]
    assert world.elastic("status", "gpt")[0] == 104
    world.kubernetes.table.update(
        world.kubernetes.resource("RayJob"), "team", "gpt", lambda live: without_finalizers(live), "kuberay-operator"
    )
    code, out, err = world.elastic("delete", "gpt")
    assert (code, out) == (0, ["RayJob/gpt deleted", "NetworkPolicy/gpt deleted", "Secret/gpt-token deleted"])
    assert err[-1] == "run gpt is deleted; its checkpoints are kept. Next: elastic kube apply job.yaml"
    assert world.elastic("status", "gpt")[0] == 102


def test_a_list_of_runs(world: World) -> None:
    assert world.elastic("status")[:2] == (0, [])
    world.elastic("apply", "run.yaml")
    code, out, _ = world.elastic("status")
    assert code == 0
    assert out[1].split() == ["gpt", "RayJob", "pending"]
    assert [json.loads(line)["run"] for line in world.elastic("status", "--json")[1]] == ["gpt"]


def test_a_dry_run_shows_what_would_be_and_hides_what_is_secret(world: World) -> None:
    job = ray_job()
    template = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    template["spec"]["containers"][0]["env"] = [{"name": "MODE", "value": "hunter2"}]
    job["spec"]["runtimeEnvYAML"] = "env_vars: {KEY: hunter2}"
    Path("run.yaml").write_text(yaml.safe_dump(job))
    code, out, err = world.elastic("apply", "run.yaml", "--dry-run", "--json")
    assert code == 0
    entries = [json.loads(line) for line in out]
    assert [(entry["kind"], entry["outcome"], entry["dry_run"]) for entry in entries] == [
        ("Secret", "created", True),
        ("RayJob", "created", True),
    ]
    assert entries[0]["object"]["data"] == {"auth_token": "***"}
    spec = entries[1]["object"]["spec"]
    container = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert container["env"] == [{"name": "MODE", "value": "***"}]
    assert "hunter2" not in "".join(out + err)
    assert err == ["run gpt would be accepted; nothing was changed. Next: elastic kube apply run.yaml"]
    assert world.kubernetes.objects("RayJob") == {}


def test_the_token_is_in_no_stream_and_no_log(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    said: list[str] = []
    for arguments in (["apply", "run.yaml"], ["apply", "run.yaml", "--json"], ["status", "gpt", "--json"]):
        _, out, err = world.elastic(*arguments)
        said += out + err
    encoded = world.kubernetes.objects("Secret")["gpt-token"]["data"]["auth_token"]
    for secret in (encoded, base64.b64decode(encoded).decode()):
        assert secret not in "".join(said) + caplog.text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", "run.yaml is not YAML: "),
        ("a: 1", "run.yaml line 1: unknown key 'a'"),
        ("kind: RayJob", "run.yaml: document 1 is not a Kubernetes object"),
        ("", "run.yaml"),
        (
            yaml.safe_dump_all([ray_job("gpt"), network_policy("other")]),
            "run.yaml: all objects must carry the labels of one run",
        ),
    ],
)
def test_what_is_no_run_is_refused_before_anything_is_asked(world: World, text: str, told: str) -> None:
    Path("run.yaml").write_text(text)
    code, _, err = world.elastic("apply", "run.yaml")
    assert code == 2
    assert err[0].startswith(f"elastic kube: {told}")
    assert world.kubernetes.requests == []


def test_no_such_file(world: World) -> None:
    code, _, err = world.elastic("apply", "nothing.yaml")
    assert (code, err) == (2, ["elastic kube: nothing.yaml cannot be read: No such file or directory"])


def test_what_the_operator_would_refuse_later_is_refused_now(world: World) -> None:
    job = ray_job()
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"] = 0
    Path("run.yaml").write_text(yaml.safe_dump(job))
    code, _, err = world.elastic("apply", "run.yaml")
    told = "spec.rayClusterSpec.workerGroupSpecs[0].minReplicas: 1 is above maxReplicas, which is 0"
    assert (code, err) == (2, [f"elastic kube: run.yaml: RayJob gpt: {told}"])
    assert world.kubernetes.requests == []


def test_a_job_file_goes_where_it_says(world: World, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text("def main(config): ...\n")
    code, out, err = world.elastic("apply", "job.yaml", "--dry-run", "--image", "example/gpt")
    assert (code, out) == (0, ["RayJob/gpt created (dry run)", "ConfigMap/gpt-files created (dry run)"][::-1])
    assert err[-1] == (
        "run gpt would be accepted; nothing was changed. Next: elastic kube apply job.yaml --image example/gpt"
    )
    assert world.elastic("apply", "job.yaml", "--image", "example/gpt", "--cluster", "--run-id", "big")[0] == 0
    assert world.kubernetes.objects("RayCluster").keys() == {"big"}
    code, _, err = world.elastic("apply", "job.yaml", "--image", "example/gpt", "--namespace", "elsewhere")
    assert (code, err[-1][:50]) == (2, "elastic kube: there is no namespace elsewhere: `ku")


def test_the_namespace_of_a_job_file_comes_before_that_of_the_context(world: World, tmp_path: Path) -> None:
    world.kubernetes.add_namespace("research")
    (tmp_path / "job.yaml").write_text(JOB + "  namespace: research\n")
    (tmp_path / "train.py").write_text("def main(config): ...\n")
    _, _, err = world.elastic("apply", "job.yaml", "--image", "example/gpt")
    assert world.kubernetes.objects("RayJob", "research").keys() == {"gpt"}
    assert err[-1] == "run gpt is applied. Next: elastic kube logs gpt -f --namespace research"


def test_what_was_rendered_for_one_namespace_is_not_put_into_another(world: World) -> None:
    code, _, err = world.elastic("apply", "run.yaml", "--namespace", "elsewhere")
    told = "run.yaml: document 1 is for namespace team: render it again with --namespace elsewhere"
    assert (code, err) == (2, [f"elastic kube: {told}"])


def test_ctrl_c_leaves_the_run_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.elastic("apply", "run.yaml")

    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("elastic_cluster.kube.client.logs.Follower.follow", interrupted)
    assert world.elastic("logs", "gpt", "-f") == (101, [], ["run gpt continues. Next: elastic kube logs gpt -f"])


@pytest.mark.parametrize(
    ("state", "reason", "driver", "code"),
    [
        (words.PENDING, "", None, 101),
        (words.RUNNING, "", None, 101),
        (words.RETRYING, "", 104, 101),
        (words.FINISHED, "", None, 0),
        (words.STOPPED, "", None, 103),
        (words.REFUSED, "ValidationFailed: x", None, 2),
        (words.FAILED, "AppFailed", 105, 105),
        (words.FAILED, "AppFailed", 100, 100),
        # Killed, or not a driver of ours: it did not say how the run ended.
        (words.FAILED, "AppFailed", -9, 101),
        (words.FAILED, "AppFailed", 0, 101),
        (words.FAILED, "AppFailed", 1, 101),
        (words.FAILED, "DeadlineExceeded", None, 101),
        (words.FAILED, "PreRunningDeadlineExceeded: x", None, 105),
        (words.DELETING, "", None, 101),
    ],
)
def test_exit_codes(state: str, reason: str, driver: int | None, code: int) -> None:
    assert result(RunStatus("gpt", "RayJob", "gpt", "team", state, reason, driver)) == code


@pytest.mark.parametrize(
    ("error", "code"), [(KubeNotFound("x"), 102), (KubeQuota("x"), 105), (KubeRefused("x"), 2), (KubeError("x"), 101)]
)
def test_exit_codes_of_errors(error: KubeError, code: int) -> None:
    assert translated(error).exit_code == code


@pytest.mark.parametrize("command", ["apply", "status", "logs", "delete"])
def test_help_has_an_example_that_is_understood(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["kube", command, "--help"])
    text = capsys.readouterr().out
    (example,) = [line.split()[1:] for line in text.splitlines() if line.startswith("  elastic kube")]
    assert cli.parser().parse_args(example).kube_command == command
    assert "--json" in text
    assert "--namespace" in text


def without_finalizers(live: dict[str, object]) -> dict[str, object]:
    metadata = live["metadata"]
    assert isinstance(metadata, dict)
    return {**live, "metadata": {**metadata, "finalizers": []}}
