"""What goes wrong on the way to Kubernetes: one sentence that says what to do."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from elastic_cluster.kube.client.api import Limits, Ref
from elastic_cluster.kube.client.apply import apply_run
from elastic_cluster.kube.client.connect import connect
from elastic_cluster.kube.client.errors import (
    AlreadyThere,
    Conflict,
    KubeDenied,
    KubeError,
    KubeQuota,
    KubeRefused,
    KubeUnavailable,
    explain,
)
from elastic_cluster.kube.client.runs import find_runs
from kube_fake import FakeKubernetes
from kube_fake.server import kubeconfig as config_of
from kube_samples import connected, ray_job

NOWHERE = "http://127.0.0.1:9"
JOB = Ref("ray.io/v1", "RayJob", "team", "gpt")


def refusal(reason: str, message: str, causes: list[dict[str, str]] | None = None, kind: str = "rayjobs") -> str:
    return json.dumps({"reason": reason, "message": message, "details": {"kind": kind, "causes": causes or []}})


# As API servers word them, less what varies.
ANSWERS: list[tuple[int, str, type[KubeError], str]] = [
    (401, refusal("Unauthorized", "Unauthorized"), KubeDenied, "the API does not accept these credentials: log in"),
    (
        403,
        refusal(
            "Forbidden",
            'rayjobs.ray.io "gpt" is forbidden: User "dev" cannot patch resource "rayjobs" in API group "ray.io" '
            'in the namespace "team"',
        ),
        KubeDenied,
        "dev may not patch rayjobs.ray.io in namespace team: ask for a Role with that verb",
    ),
    (
        403,
        refusal("Forbidden", 'pods is forbidden: User "dev" cannot list resource "pods" in API group ""'),
        KubeDenied,
        "dev may not list pods in the whole cluster",
    ),
    (
        403,
        refusal("Forbidden", 'pods "x" is forbidden: exceeded quota: gpus, requested: a=8, used: a=8, limited: a=8'),
        KubeQuota,
        "namespace team has no room for RayJob gpt: exceeded quota: gpus, requested: a=8, used: a=8, limited: a=8",
    ),
    (
        403,
        refusal("Forbidden", 'unable to create new content in namespace team because it is being terminated'),
        KubeRefused,
        "namespace team is being deleted: choose another with --namespace",
    ),
    (
        400,
        refusal("BadRequest", 'admission webhook "v.kb.io" denied the request: no\nqueue'),
        KubeRefused,
        "the admission webhook v.kb.io refuses RayJob gpt in namespace team: no queue",
    ),
    (
        400,
        refusal("BadRequest", 'strict decoding error: unknown field "spec.a", unknown field "spec.b"'),
        KubeRefused,
        "the cluster does not know the field spec.a of RayJob gpt (and 1 more): its CRDs are older than KubeRay 1.7",
    ),
    (
        404,
        refusal("NotFound", 'namespaces "team" not found', kind="namespaces"),
        KubeRefused,
        "there is no namespace team: `kubectl create namespace team`",
    ),
    (404, refusal("NotFound", 'rayjobs "gpt" not found'), KubeError, "there is no RayJob gpt in namespace team"),
    (409, refusal("AlreadyExists", "x"), AlreadyThere, "there is already a RayJob gpt in namespace team"),
    (409, refusal("Conflict", "the object has been modified"), Conflict, "was changed by somebody else at"),
    (422, refusal("Invalid", "x", [{"field": "a", "message": "bad"}] * 3), KubeRefused, "valid: a: bad (and 2 more)"),
    (429, refusal("TooManyRequests", "slow down"), KubeUnavailable, "the API could not patch RayJob gpt"),
    (503, "<html>\n upstream  gone </html>", KubeUnavailable, "(HTTP 503): <html> upstream gone </html>"),
    (418, "[]", KubeError, "the API answered HTTP 418 to patch RayJob gpt in namespace team"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "kind", "told"), ANSWERS)
def test_an_answer_is_explained(status: int, body: str, kind: type[KubeError], told: str) -> None:
    error = explain(status, body, JOB, "patch", "the API")
    assert isinstance(error, kind)
    assert told in str(error)
    assert "\n" not in str(error)


def test_a_refused_secret_is_not_quoted() -> None:
    causes = [{"field": "data[key]", "message": 'Invalid value: "hunter2": must be base64'}]
    body = refusal("Invalid", 'Secret "s" is invalid: data[key]: Invalid value: "hunter2"', causes)
    error = explain(422, body, Ref("v1", "Secret", "team", "s"), "create", "the API")
    assert str(error) == "Secret s in namespace team is not valid: its data[key]"


def test_a_long_answer_is_cut() -> None:
    assert len(str(explain(500, "x" * 100_000, JOB, "patch", "the API"))) < 1_000


def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))


def test_no_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    with pytest.raises(KubeRefused, match=r"there is no kubeconfig at .*nothing: set KUBECONFIG"):
        connect()


@pytest.mark.parametrize("text", ["", "[]", "a: [", "kind: Config", "current-context: x\ncontexts: []"])
def test_a_kubeconfig_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    kubeconfig(tmp_path, monkeypatch, text)
    with pytest.raises(KubeRefused, match=r"the kubeconfig .* cannot be (read|used): "):
        connect()


def test_a_context_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubeconfig(tmp_path, monkeypatch, config_of(NOWHERE))
    with pytest.raises(KubeRefused, match=r"there is no context 'prod' in .*; there are: test"):
        connect("prod")


@pytest.mark.parametrize(("namespace", "meant"), [("research", "research"), (None, "default")])
def test_the_namespace_of_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str | None, meant: str
) -> None:
    with connected(NOWHERE, tmp_path, monkeypatch, namespace=namespace) as client:
        assert client.namespace == meant


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        free_port() as port,
        connected(f"http://127.0.0.1:{port}", tmp_path, monkeypatch) as client,
        pytest.raises(KubeUnavailable, match=r"the Kubernetes API at http.* cannot be reached: .*refused"),
    ):
        find_runs(client, "team")


def test_somebody_else_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Website(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Website) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with (
            connected(f"http://127.0.0.1:{server.server_address[1]}", tmp_path, monkeypatch) as client,
            pytest.raises(KubeUnavailable, match="does not answer as a Kubernetes API does"),
        ):
            find_runs(client, "team")
        server.shutdown()


def test_a_server_that_never_answers_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(connect_s=1.0, request_s=0.2, idle_s=0.2, retry_s=0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            connected(url, tmp_path, monkeypatch, limits) as client,
            pytest.raises(KubeUnavailable, match=r"cannot be reached: .*timed out"),
        ):
            find_runs(client, "team")


def test_wrong_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        FakeKubernetes() as kubernetes,
        connected(kubernetes, tmp_path, monkeypatch, token="old") as client,
        pytest.raises(KubeDenied, match="does not accept these credentials: log in again"),
    ):
        find_runs(client, "team")


def test_no_kuberay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        FakeKubernetes(None) as kubernetes,
        connected(kubernetes, tmp_path, monkeypatch) as client,
        pytest.raises(KubeDenied, match=r"KubeRay is not installed in .* \(no API group ray.io\): install"),
    ):
        apply_run(client, "gpt", [ray_job()])


def test_an_old_kuberay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        FakeKubernetes("v1alpha1") as kubernetes,
        connected(kubernetes, tmp_path, monkeypatch) as client,
        pytest.raises(KubeDenied, match=r"is too old: it serves ray.io/v1alpha1, and ray.io/v1 is needed"),
    ):
        apply_run(client, "gpt", [ray_job()])


def test_kuberay_is_found_once_it_has_been_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeKubernetes(None) as kubernetes:
        with connected(kubernetes, tmp_path, monkeypatch) as client, pytest.raises(KubeDenied):
            find_runs(client, "team")
        kubernetes.resources = FakeKubernetes().resources
        with connected(kubernetes, tmp_path, monkeypatch) as client:
            assert find_runs(client, "team") == []


def test_no_such_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        FakeKubernetes() as kubernetes,
        connected(kubernetes, tmp_path, monkeypatch) as client,
        pytest.raises(KubeRefused, match="there is no namespace elsewhere: `kubectl create namespace elsewhere`"),
    ):
        apply_run(client, "gpt", [ray_job(namespace="elsewhere")])


def test_the_client_is_an_extra() -> None:
    code = (
        "import sys; sys.modules['kubernetes'] = None; "
        "from elastic_jobs.cli import main; sys.exit(main(['kube', 'status']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "elastic kube: the Kubernetes client is not installed: pip install 'ray-elastic[kube]'\n"


def test_the_command_line_starts_without_the_client() -> None:
    code = (
        "import sys, elastic_jobs.cli; print([name for name in ('kubernetes', 'ray', 'torch') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


class free_port:
    """A port on which nobody listens: bound, and not listening."""

    def __enter__(self) -> int:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        return int(self._socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._socket.close()
