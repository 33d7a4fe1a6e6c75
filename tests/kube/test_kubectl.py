"""The real kubectl with the rendered example, against the fake API server over TLS."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from elastic_jobs import cli
from kube_fake import FakeKubernetes

pytest.importorskip("cryptography", reason="the fake's certificate is made by `cryptography`, which is not installed")
pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed (Debian: kubernetes-client)"
)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kubernetes.yaml"
LIMIT_S = 60
Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def fake() -> Iterator[FakeKubernetes]:
    with FakeKubernetes(tls=True) as fake:
        yield fake


@pytest.fixture
def manifests(tmp_path: Path) -> Path:
    out = tmp_path / "gpt.yaml"
    assert cli.main(["kube", "render", str(EXAMPLE), "--namespace", "team", "-o", str(out)]) == 0
    return out


@pytest.fixture
def kubectl(fake: FakeKubernetes, tmp_path: Path) -> Kubectl:
    return _kubectl(fake.kubeconfig(), tmp_path)


def _kubectl(config: str, folder: Path) -> Kubectl:
    (folder / "config").write_text(config)
    common = ["kubectl", "--kubeconfig", str(folder / "config"), "--cache-dir", str(folder / "cache")]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*common, *arguments], capture_output=True, text=True, timeout=LIMIT_S)

    return run


def test_the_example_is_applied_shown_and_deleted(fake: FakeKubernetes, kubectl: Kubectl, manifests: Path) -> None:
    names = {(each["kind"], each["metadata"]["name"]) for each in yaml.safe_load_all(manifests.read_text())}
    for more, words in (
        (("--dry-run=server",), "created (server dry run)"),
        ((), "created"),
        (("--server-side", "--force-conflicts"), "serverside-applied"),
    ):
        applied = kubectl("apply", "-f", str(manifests), *more)
        assert applied.returncode == 0, applied.stderr
        assert [line.split(" ", 1)[1] for line in applied.stdout.splitlines()] == [words] * len(names)
        here = {(kind, name) for kind, _ in names for name in fake.objects(kind)}
        assert here == (set() if "--dry-run=server" in more else names)
    got = kubectl("get", "rayjobs", "--selector", "ray-elastic/run=gpt-k8s", "-o", "json")
    (job,) = json.loads(got.stdout)["items"]
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("ray.io/v1", "RayJob", "gpt-k8s")
    described = kubectl("describe", "rayjob", "gpt-k8s")
    assert described.returncode == 0, described.stderr
    assert "Shutdown After Job Finishes:  true" in described.stdout
    deleted = kubectl("delete", "-f", str(manifests), f"--timeout={LIMIT_S}s")
    assert deleted.returncode == 0, deleted.stderr
    assert not any(fake.objects(kind) for kind, _ in names)


def test_a_field_that_kuberay_does_not_know_is_refused(fake: FakeKubernetes, kubectl: Kubectl, manifests: Path) -> None:
    text = manifests.read_text()
    manifests.write_text(text.replace("shutdownAfterJobFinishes:", "shutdownAfterJobFinishs:"))
    applied = kubectl("apply", "-f", str(manifests))
    assert applied.returncode != 0
    assert 'unknown field "spec.shutdownAfterJobFinishs"' in applied.stderr
    assert fake.objects("RayJob") == {}


def test_a_token_that_is_none_is_refused(fake: FakeKubernetes, tmp_path: Path) -> None:
    got = _kubectl(fake.kubeconfig(token="nobody's"), tmp_path)("get", "rayjobs")
    assert got.returncode != 0
    assert "must be logged in" in got.stderr or "Unauthorized" in got.stderr
