"""The fake behind HTTP on loopback."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Mapping
from http.server import ThreadingHTTPServer
from types import TracebackType
from typing import Any

from kube_fake.certificate import self_signed
from kube_fake.handler import Handler
from kube_fake.logs import PodLog
from kube_fake.object_table import ObjectTable
from kube_fake.rbac import ADMIN
from kube_fake.request import Fault, Request
from kube_fake.resources import Resource, served
from kube_fake.schema import RULES, rules
from kube_fake.validation import Manifest

ADMIN_TOKEN = "fake-admin-token"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Half-open keep-alive connections of a test that is over must not be waited for.
    block_on_close = False
    fake: FakeKubernetes

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no error here; anything else is the fake's own."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            self.fake.errors.append(traceback.format_exc())


class FakeKubernetes:
    """A context manager. `namespace` exists from the start; `kuberay` is the version of its API, None without it."""

    def __init__(self, kuberay: str | None = "v1", namespace: str = "team", tls: bool = False) -> None:
        # For the kubeconfig; empty where the fake speaks plain HTTP.
        self.certificate = ""
        self._tls = tls
        self.resources = served(kuberay)
        if unknown := {rule for each in self.resources for rule in rules(each.schema)} - RULES.keys():
            raise ValueError(f"the CRDs have validation rules that the fake does not know: {sorted(unknown)}")
        self.table = ObjectTable()
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.logs: dict[tuple[str, str, str], PodLog] = {}
        self.users = {ADMIN_TOKEN: ADMIN}
        # Bugs of the fake, seen when it ends.
        self.errors: list[str] = []
        self.stopping = threading.Event()
        self._server: _Server
        self._thread: threading.Thread
        self.add_namespace(namespace)

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeKubernetes:
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.fake = self
        if self._tls:
            context, self.certificate = self_signed()
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.02,), name="fake-kubernetes", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopping.set()
        with self.table.changed:
            self.table.changed.notify_all()
        for log in self.logs.values():
            log.end()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10.0)
        if self.errors:
            raise AssertionError(f"the fake API server failed: {self.errors[0]}")

    def resource(self, kind: str) -> Resource:
        return next(each for each in self.resources if each.kind == kind)

    def add_namespace(self, name: str) -> None:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        self.table.create(self.resource("Namespace"), "", body, "test", dry_run=False, strict=False)

    def add(self, manifest: Manifest, manager: str = "test") -> Manifest:
        """As if somebody else had created it."""
        resource, namespace = self.resource(manifest["kind"]), manifest["metadata"].get("namespace", "")
        return self.table.create(resource, namespace, manifest, manager, dry_run=False, strict=False)

    def objects(self, kind: str, namespace: str = "team") -> dict[str, Manifest]:
        """By name."""
        found = self.table.find(self.resource(kind), namespace, "")
        return {each["metadata"]["name"]: each for each in found}

    def set_status(self, kind: str, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """As a controller does; fields of the old status that are not named stay."""

        def change(live: Manifest) -> Manifest:
            return {**live, "status": {**live.get("status", {}), **status}}

        self.table.update(self.resource(kind), namespace, name, change, "kuberay-operator")

    def log(self, namespace: str, pod: str, container: str) -> PodLog:
        """Made when it is first asked for."""
        return self.logs.setdefault((namespace, pod, container), PodLog())

    def add_user(self, name: str) -> str:
        """Their token. They may do what the Roles bound to them say."""
        token = f"token-of-{name}"
        self.users[token] = name
        return token

    def kubeconfig(self, namespace: str | None = "team", token: str = ADMIN_TOKEN) -> str:
        return kubeconfig(self.url, namespace, token, self.certificate)


def kubeconfig(url: str, namespace: str | None = "team", token: str = ADMIN_TOKEN, certificate: str = "") -> str:
    """Of a server, as JSON, which is YAML. Its one context is called "test"."""
    context: dict[str, Any] = {"cluster": "fake", "user": "me"}
    if namespace is not None:
        context["namespace"] = namespace
    cluster = {"server": url, **({"certificate-authority-data": certificate} if certificate else {})}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "fake", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": context}],
        }
    )
