"""The interface of api.py over the official Python client. The only module that knows it, and its errors."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import urllib3
from kubernetes import dynamic
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic.exceptions import ResourceNotFoundError

from elastic_cluster.kube.client.api import Limits, Manifest, Ref, Stored
from elastic_cluster.kube.client.errors import (
    KubeError,
    KubeNotFound,
    KubeStale,
    KubeUnavailable,
    explain,
    missing_kind,
)
from elastic_cluster.kube.manifests.labels import MANAGER

_T = TypeVar("_T")
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_FIRST_PAUSE_S = 0.2
_CREATED = 201


class _Dynamic(dynamic.DynamicClient):  # type: ignore[misc]  # the library ships no types for it
    """Discovery goes through here too and passes no limit of its own."""

    limits: Limits

    def __init__(self, client: Any, cache_file: str, limits: Limits) -> None:
        self.limits = limits
        super().__init__(client, cache_file)

    def request(self, method: str, path: str, body: Any = None, **params: Any) -> Any:
        params.setdefault("_request_timeout", (self.limits.connect_s, self.limits.request_s))
        return super().request(method, path, body, **params)


class OfficialClient:
    """See `Objects` and `PodLogs`. Connects at the first request."""

    def __init__(self, client: Any, namespace: str, where: str, limits: Limits) -> None:
        self.namespace, self.where = namespace, where
        self._client, self._limits = client, limits
        self._found: _Dynamic | None = None
        self._reached = False

    def close(self) -> None:
        # Of the library's versions only some have a close of their own, and none closes the idle connections.
        self._client.rest_client.pool_manager.clear()

    def apply(self, manifest: Mapping[str, Any], *, dry_run: bool, force: bool = False) -> Stored:
        ref = Ref.of(manifest, self.namespace)
        query = [("fieldManager", MANAGER), ("force", str(force).lower()), *_writing(dry_run)]
        path = self._resource(ref).path(name=ref.name, namespace=ref.namespace)
        content = "application/apply-patch+yaml"
        answer = self._send("patch", ref, path, query, dict(manifest), content_type=content)
        return Stored(json.loads(answer.data), answer.status == _CREATED)

    def create(self, manifest: Mapping[str, Any], *, dry_run: bool) -> Manifest:
        ref = Ref.of(manifest, self.namespace)
        path = self._resource(ref).path(namespace=ref.namespace)
        return self._json("post", ref, path, [("fieldManager", MANAGER), *_writing(dry_run)], dict(manifest))

    def get(self, ref: Ref, *, metadata_only: bool = False) -> Manifest | None:
        more = {"header_params": {"Accept": _METADATA}} if metadata_only else {}
        try:
            return self._json("get", ref, self._resource(ref).path(name=ref.name, namespace=ref.namespace), [], **more)
        except KubeNotFound:
            return None

    def find(
        self, api_version: str, kind: str, namespace: str, selector: str, *, metadata_only: bool = False
    ) -> list[Manifest]:
        ref = Ref(api_version, kind, namespace, selector)
        path = self._resource(ref).path(namespace=namespace)
        more = {"header_params": {"Accept": _METADATA_LIST}} if metadata_only else {}
        listed = self._json("get", ref, path, [("labelSelector", selector)], verb="list", **more)
        # The items of a list do not say what they are, or that they are metadata.
        found = [{**item, "apiVersion": api_version, "kind": kind} for item in listed["items"]]
        return sorted(found, key=lambda item: str(item["metadata"]["name"]))

    def delete(self, ref: Ref, uid: str, *, foreground: bool = True) -> None:
        path = self._resource(ref).path(name=ref.name, namespace=ref.namespace)
        policy = "Foreground" if foreground else "Background"
        body = {"propagationPolicy": policy, "preconditions": {"uid": uid}}
        try:
            self._json("delete", ref, path, [], body)
        except KubeNotFound:
            return

    def watch(self, ref: Ref, resource_version: str, limit_s: float) -> Iterator[Manifest | None]:
        path = self._resource(ref).path(namespace=ref.namespace)
        query = [
            ("watch", "true"),
            ("fieldSelector", f"metadata.name={ref.name}"),
            ("resourceVersion", resource_version),
            ("timeoutSeconds", str(max(1, round(limit_s)))),
        ]
        try:
            for line in _lines(self._stream("watch", ref, path, query, limit_s + self._limits.connect_s)):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                if event["type"] != "BOOKMARK":
                    yield None if event["type"] == "DELETED" else event["object"]
        except KubeStale:
            # Handled like an error in the stream: the watcher reads the object and watches again from there.
            return

    def read(self, pod: Ref, container: str, since: str | None, follow: bool) -> Iterator[bytes]:
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/log"
        query = [("container", container), ("timestamps", "true"), ("follow", str(follow).lower())]
        if since is not None:
            query.append(("sinceTime", since))
        return self._stream("get the log of", pod, path, query, self._limits.idle_s)

    def _stream(self, verb: str, ref: Ref, path: str, query: list[tuple[str, str]], idle_s: float) -> Iterator[bytes]:
        timeout = (self._limits.connect_s, idle_s)

        def opened() -> Any:
            return self._api.request("get", path, query_params=query, serialize=False, _request_timeout=timeout)

        response = self._call(verb, ref, opened)
        try:
            # read1 returns what has come so far, and does not wait until a chunk of some size is full.
            while chunk := response.read1():
                yield chunk
        except (urllib3.exceptions.HTTPError, OSError):
            # A broken stream counts as ended: the reader reconnects in any case.
            return
        finally:
            response.close()
            response.release_conn()

    def _json(self, *arguments: Any, **more: Any) -> Manifest:
        data: Manifest = json.loads(self._send(*arguments, **more).data)
        return data

    def _send(
        self, method: str, ref: Ref, path: str, query: list[tuple[str, str]], body: Any = None, **more: Any
    ) -> Any:
        verb = str(more.pop("verb", method))

        def sent() -> Any:
            return self._api.request(method, path, body, query_params=list(query), serialize=False, **more)

        return self._call(verb, ref, sent)

    @property
    def _api(self) -> _Dynamic:
        """Discovery keeps what it has found in a file. Ours is thrown away: the default one is of a guessable name in
        the shared temporary folder, and would hide a KubeRay that has been installed since."""
        if self._found is None:
            with tempfile.TemporaryDirectory(prefix="elastic-kube-") as folder:
                self._found = _Dynamic(self._client, os.path.join(folder, "discovery.json"), self._limits)
        return self._found

    def _resource(self, ref: Ref) -> Any:
        try:
            return self._call(
                "discover", ref, lambda: self._api.resources.get(api_version=ref.api_version, kind=ref.kind)
            )
        except ResourceNotFoundError:
            raise missing_kind(ref, self._call("discover", ref, self._groups), self.where) from None
        except (AttributeError, KeyError, TypeError, ValueError):
            # Discovery reads what it is given without looking.
            raise KubeUnavailable(
                f"{self.where} does not answer as a Kubernetes API does: is it another server?"
            ) from None

    def _groups(self) -> dict[str, list[str]]:
        groups = json.loads(self._api.request("get", "/apis", serialize=False).data)["groups"]
        return {group["name"]: [version["version"] for version in group["versions"]] for group in groups}

    def _call(self, verb: str, ref: Ref, send: Callable[[], _T]) -> _T:
        """Every request of ours may be repeated: what it did the first time it does not do twice."""
        deadline, pause_s = time.monotonic() + self._limits.retry_s, _FIRST_PAUSE_S
        while True:
            try:
                answer = send()
            except ApiException as error:
                problem: KubeError = explain(error.status or 0, error.body, ref, verb, self.where)
                self._reached = True
            except (urllib3.exceptions.HTTPError, OSError) as error:
                problem = KubeUnavailable(f"{self.where} cannot be reached: {_why(error)}")
                if not self._reached:
                    raise problem from None
            else:
                self._reached = True
                return answer
            if not isinstance(problem, KubeUnavailable) or time.monotonic() + pause_s > deadline:
                raise problem from None
            time.sleep(pause_s)
            pause_s *= 2


def _writing(dry_run: bool) -> list[tuple[str, str]]:
    """Strict: a field that the cluster does not know is refused, where the default is to drop it with a warning."""
    return [("fieldValidation", "Strict"), *([("dryRun", "All")] if dry_run else [])]


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Whole lines; one that is not ended is left out."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line)


def _why(error: Exception) -> str:
    """The innermost reason: urllib3 wraps it in what the pool was doing."""
    while isinstance(reason := getattr(error, "reason", None), Exception):
        error = reason
    text = str(error)
    # For example "<urllib3.connection.HTTPConnection object at 0x...>: Failed to establish a new connection: ...".
    return text.rpartition(">: ")[2] if text.startswith("<") else text
