"""HTTP: from a request line to a call of the table, and its answer back as JSON, a watch or a log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import yaml

from kube_fake import rbac
from kube_fake.object_table import Key, selected
from kube_fake.patches import patched
from kube_fake.request import Fault, Request
from kube_fake.resources import VERSIONS_DOCUMENT, Place, groups_document, locate, openapi_document, resources_document
from kube_fake.validation import Manifest, Refusal

if TYPE_CHECKING:
    from kube_fake.server import FakeKubernetes

_VERSION = {"major": "1", "minor": "34", "gitVersion": "v1.34.0-fake"}
_LOG_IDLE_S = 30.0
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # A client that is gone must not keep a thread.
    timeout = 60
    # Head and body of an answer in one packet: else each waits 40 ms for the other's acknowledgement.
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is written to stderr."""

    @property
    def _fake(self) -> FakeKubernetes:
        fake: FakeKubernetes = self.server.fake  # type: ignore[attr-defined]
        return fake

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self._query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._place: Place | None = None
        self._user = ""
        try:
            self._route(url.path)
        except Refusal as refusal:
            self._send(refusal.code, refusal.body)
        except BrokenPipeError:
            self.close_connection = True

    def _route(self, path: str) -> None:
        user = self._fake.users.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))
        if user is None:
            raise Refusal(401, "Unauthorized", "Unauthorized")
        self._user = user
        if (document := self._discovery(path)) is not None:
            self._send(200, document)
            return
        place = locate(self._fake.resources, path)
        if place is None:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        self._place = place
        if (fault := self._fault(self._verb, place)) is not None:
            self._fail(fault)
            return
        self._authorize(place, self._verb)
        self._serve(place)

    def _discovery(self, path: str) -> dict[str, Any] | None:
        if path == "/version":
            return _VERSION
        if path == "/api":
            return VERSIONS_DOCUMENT
        if path == "/apis":
            return groups_document(self._fake.resources)
        if path.startswith("/openapi/v3"):
            return openapi_document(self._fake.resources, path.removeprefix("/openapi/v3").strip("/"))
        return resources_document(self._fake.resources, path.removeprefix("/apis/").removeprefix("/api/"))

    @property
    def _verb(self) -> str:
        if self.command != "GET":
            return _VERBS[self.command]
        if self._query.get("watch") == "true":
            return "watch"
        return "get" if self._place is not None and self._place.name else "list"

    @property
    def _dry_run(self) -> bool:
        return self._query.get("dryRun") == "All"

    def _fault(self, verb: str, place: Place) -> Fault | None:
        for fault in self._fake.faults:
            matches = fault.verb in ("*", verb) and fault.resource in ("*", place.resource.plural)
            if matches and fault.times > 0 and (fault.dry_runs or not self._dry_run):
                fault.times -= 1
                return fault
        return None

    def _fail(self, fault: Fault) -> None:
        if fault.code == 0:
            self.close_connection = True
            return
        raise Refusal(fault.code, "InternalError", "a fault that the test asked for")

    def _authorize(self, place: Place, verb: str) -> None:
        find = self._fake.table.find
        roles = find(self._fake.resource("Role"), place.namespace, "")
        bindings = find(self._fake.resource("RoleBinding"), place.namespace, "")
        if not rbac.allowed(self._user, verb, place, roles, bindings):
            raise Refusal(403, "Forbidden", rbac.sentence(self._user, verb, place), kind=place.resource.plural)

    def _serve(self, place: Place) -> None:
        resource, namespace, name = place.resource, place.namespace or "", place.name or ""
        table = self._fake.table
        match self._verb:
            case "get" if place.subresource == "log":
                self._log(namespace, name)
            case "get":
                found = table.get(resource, namespace, name)
                if "as=PartialObjectMetadata" in (self.headers.get("Accept") or ""):
                    found = {"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", **_metadata(found)}
                self._send(200, found)
            case "list":
                items = table.find(resource, place.namespace, self._query.get("labelSelector", ""))
                if "as=PartialObjectMetadataList" in (self.headers.get("Accept") or ""):
                    items = [_metadata(each) for each in items]
                bare = [
                    {key: value for key, value in each.items() if key not in ("apiVersion", "kind")} for each in items
                ]
                metadata = {"resourceVersion": table.version}
                self._send(
                    200,
                    {
                        "kind": f"{resource.kind}List",
                        "apiVersion": resource.api_version,
                        "metadata": metadata,
                        "items": bare,
                    },
                )
            case "watch":
                self._watch(place)
            case "delete":
                self._send(200, table.delete(resource, namespace, name, self._json() or {}))
            case _:
                self._send(*self._write(place))

    def _write(self, place: Place) -> tuple[int, Manifest]:
        resource, namespace = place.resource, place.namespace or ""
        table, strict = self._fake.table, self._query.get("fieldValidation") == "Strict"
        self._check_namespace(place)
        kind = (self.headers.get("Content-Type") or "").partition(";")[0]
        if self._verb == "create":
            made = table.create(resource, namespace, self._json(), self._manager, dry_run=self._dry_run, strict=strict)
            return 201, made
        if kind == "application/apply-patch+yaml":
            if "fieldManager" not in self._query:
                raise Refusal(400, "BadRequest", "fieldManager is required for apply patch")
            force = self._query.get("force") == "true"
            if new := place.name not in self._fake.objects(resource.kind, namespace):
                self._authorize(place, "create")
            made = table.apply(
                resource, namespace, self._json(), self._manager, force=force, dry_run=self._dry_run, strict=strict
            )
            return 201 if new else 200, made
        body = self._json()
        changed = table.update(
            resource, namespace, place.name or "", lambda live: patched(kind, live, body), self._manager,
            dry_run=self._dry_run,
        )  # fmt: skip
        return 200, changed

    def _check_namespace(self, place: Place) -> None:
        if place.namespace is not None and place.namespace not in self._fake.objects("Namespace", ""):
            message = f'namespaces "{place.namespace}" not found'
            raise Refusal(404, "NotFound", message, kind="namespaces")

    @property
    def _manager(self) -> str:
        """Without a name of its own, a client is called by its program."""
        return self._query.get("fieldManager") or (self.headers.get("User-Agent") or "unknown").partition("/")[0]

    def _json(self) -> Any:
        return yaml.safe_load(self._body) if self._body else None

    def _log(self, namespace: str, pod: str) -> None:
        self._fake.table.get(self._fake.resource("Pod"), namespace, pod)
        log = self._fake.logs.get((namespace, pod, self._query.get("container", "")))
        if log is None:
            message = (
                f'container "{self._query.get("container")}" in pod "{pod}" is waiting to start: ContainerCreating'
            )
            raise Refusal(400, "BadRequest", message)
        follow, timestamps = self._query.get("follow") == "true", self._query.get("timestamps") == "true"
        self._stream("text/plain", log.stream(self._query.get("sinceTime"), follow, timestamps, _LOG_IDLE_S))

    def _watch(self, place: Place) -> None:
        self._stream("application/json", self._events(place))

    def _events(self, place: Place) -> Iterator[bytes]:
        table = self._fake.table
        seen, limit_s = int(self._query.get("resourceVersion") or 0), float(self._query.get("timeoutSeconds") or 30)
        name = self._query.get("fieldSelector", "").removeprefix("metadata.name=")

        def matches(key: Key, changed: Manifest) -> bool:
            here = key[0] == place.resource.qualified and place.namespace in (None, key[1]) and name in ("", key[2])
            return here and selected(changed, self._query.get("labelSelector", ""))

        while not self._fake.stopping.is_set():
            changes = list(table.since(seen, matches))
            for _, kind, changed in changes:
                yield json.dumps({"type": kind, "object": changed}).encode() + b"\n"
            seen = changes[-1][0] if changes else seen
            with table.changed:
                if not any(table.since(seen, matches)) and not table.changed.wait(limit_s):
                    return

    def _stream(self, kind: str, chunks: Iterator[bytes]) -> None:
        self._note(200)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, code: int, document: Any) -> None:
        self._note(code)
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _note(self, code: int) -> None:
        if (place := self._place) is not None:
            resource = place.resource.plural + (f"/{place.subresource}" if place.subresource else "")
            manager = self._query.get("fieldManager", "")
            self._fake.requests.append(
                Request(self._verb, resource, place.namespace, place.name, self._dry_run, manager, self._user, code)
            )


def _metadata(found: Manifest) -> Manifest:
    return {"metadata": {**found["metadata"], "managedFields": []}}
