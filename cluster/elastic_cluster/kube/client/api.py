"""The Kubernetes API as this package sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Ref:
    """Which object. `str` is how sentences call it: "RayJob gpt in namespace team"."""

    api_version: str
    kind: str
    namespace: str
    name: str

    @classmethod
    def of(cls, manifest: Mapping[str, Any], namespace: str = "") -> Ref:
        """Of a manifest as it is written or as the API returned it; `namespace` where it names none."""
        metadata = manifest["metadata"]
        place = str(metadata.get("namespace") or namespace)
        return cls(str(manifest["apiVersion"]), str(manifest["kind"]), place, str(metadata["name"]))

    @property
    def group(self) -> str:
        """ "" for the core group."""
        return self.api_version.rpartition("/")[0]

    def __str__(self) -> str:
        return f"{self.kind} {self.name} in namespace {self.namespace}"


@dataclass(frozen=True)
class Stored:
    """An object as the server has it. `created`: it was this call that made it, or would have."""

    object: Manifest
    created: bool


@dataclass(frozen=True)
class Limits:
    """How long one request may take. Nothing in this package waits without one of these."""

    connect_s: float = 10.0
    request_s: float = 30.0
    # A stream without data for this long is reopened: its connection may be dead without an error.
    idle_s: float = 60.0
    # Of a server that answers 429 or 5xx, or of a connection that breaks after others had worked.
    retry_s: float = 20.0


class Objects(Protocol):
    """Objects of one cluster. Every method raises KubeError. Not safe for use from several threads at once. Call order:

    1. `apply` with `dry_run`, for every object there is
    2. `create` for a secret that must not be overwritten, then `apply` of the objects
    3. `get`, `find` and `watch` while they live
    4. `delete`, then `watch` or `get` until they are gone

    None of them promises that what it returned is still so.
    """

    def apply(self, manifest: Mapping[str, Any], *, dry_run: bool, force: bool = False) -> Stored:
        """Server-side apply as the field manager "ray-elastic"; `force` takes over fields of other managers."""

    def create(self, manifest: Mapping[str, Any], *, dry_run: bool) -> Manifest:
        """Raises AlreadyThere when there is one of that name."""

    def get(self, ref: Ref, *, metadata_only: bool = False) -> Manifest | None:
        """None when there is none. `metadata_only` leaves the contents (of a secret, say) in the cluster."""

    def find(
        self, api_version: str, kind: str, namespace: str, selector: str, *, metadata_only: bool = False
    ) -> list[Manifest]:
        """By labels, in the order of their names."""

    def delete(self, ref: Ref, uid: str, *, foreground: bool = True) -> None:
        """In the foreground it goes after everything that it owns, else before. Another of its name is left alone."""

    def watch(self, ref: Ref, resource_version: str, limit_s: float) -> Iterator[Manifest | None]:
        """Each new state after `resource_version`; None when it is gone. Ends after `limit_s`, or sooner: ask again."""


class PodLogs(Protocol):
    """What a container prints. Raises KubeError."""

    def read(self, pod: Ref, container: str, since: str | None, follow: bool) -> Iterator[bytes]:
        """Chunks of lines that begin with their RFC 3339 time, from `since` (whole seconds; inclusive) on.

        With `follow` it continues until the container has ended, but may end sooner and without an error (a rotated
        log, a restarted kubelet, an idle connection that was cut): check the container's state.
        """


class Cluster(Objects, PodLogs, Protocol):
    """Both. `namespace` is the one of the context; `where` names server and context for sentences."""

    namespace: str
    where: str

    def close(self) -> None: ...
