"""The objects of the fake: versions, defaults, validation, field managers, owners, finalizers. No HTTP."""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kube_fake import fields
from kube_fake.resources import Resource
from kube_fake.validation import Manifest, Refusal, apply_conflict, check_known, validated

Key = tuple[str, str, str]
# Of an operation ("CREATE", "UPDATE") and an object: why it is refused, or None.
Admission = Callable[[str, Manifest], "Refusal | None"]
_FOREGROUND = "foregroundDeletion"


@dataclass
class _Entry:
    resource: Resource
    object: Manifest
    managers: dict[str, frozenset[fields.Path]] = field(default_factory=dict)


class ObjectTable:
    """Safe for use from several threads; `changed` is notified after each change."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.admission: list[Admission] = []
        # How many objects of a kind fit into a namespace, by (namespace, "rayjobs.ray.io").
        self.quota: dict[tuple[str, str], int] = {}
        self._entries: dict[Key, _Entry] = {}
        self._version = 100
        # (version, type, key, object) of every change, for watches.
        self.history: list[tuple[int, str, Key, Manifest]] = []

    @property
    def version(self) -> str:
        return str(self._version)

    def get(self, resource: Resource, namespace: str, name: str) -> Manifest:
        with self.changed:
            return self._shown(self._entry(resource, namespace, name))

    def find(self, resource: Resource, namespace: str | None, selector: str) -> list[Manifest]:
        with self.changed:
            return [
                self._shown(entry)
                for key, entry in sorted(self._entries.items())
                if entry.resource == resource and namespace in (None, key[1]) and selected(entry.object, selector)
            ]

    def create(
        self, resource: Resource, namespace: str, wanted: Manifest, manager: str, *, dry_run: bool, strict: bool
    ) -> Manifest:
        with self.changed:
            name = str(wanted["metadata"]["name"])
            if self._key(resource, namespace, name) in self._entries:
                raise Refusal(
                    409, "AlreadyExists", f'{resource.qualified} "{name}" already exists', kind=resource.plural
                )
            check_known(resource, wanted, strict)
            owned = frozenset(fields.leaves(wanted, resource.schema))
            return self._put(resource, namespace, copy.deepcopy(wanted), {manager: owned}, None, dry_run)

    def apply(
        self,
        resource: Resource,
        namespace: str,
        wanted: Manifest,
        manager: str,
        *,
        force: bool,
        dry_run: bool,
        strict: bool,
    ) -> Manifest:
        with self.changed:
            name = str(wanted["metadata"]["name"])
            entry = self._entries.get(self._key(resource, namespace, name))
            check_known(resource, wanted, strict)
            live = entry.object if entry else {}
            managers = entry.managers if entry else {}
            found = fields.conflicts(live, managers, wanted, resource.schema, manager)
            if found and not force:
                raise apply_conflict(resource, found)
            result = fields.apply(live, managers, wanted, resource.schema, manager)
            return self._put(resource, namespace, result.object, result.managers, entry, dry_run)

    def update(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        change: Callable[[Manifest], Manifest],
        manager: str,
        *,
        dry_run: bool = False,
    ) -> Manifest:
        """`change` gets a copy and returns what is to be stored."""
        with self.changed:
            entry = self._entry(resource, namespace, name)
            new = change(copy.deepcopy(entry.object))
            wanted_version = new["metadata"].get("resourceVersion")
            if wanted_version not in (None, entry.object["metadata"]["resourceVersion"]):
                message = (
                    f'Operation cannot be fulfilled on {resource.qualified} "{name}": the object has been modified; '
                    "please apply your changes to the latest version and try again"
                )
                raise Refusal(409, "Conflict", message)
            owners = fields.updated(entry.object, new, entry.managers, resource.schema, manager)
            return self._put(resource, namespace, new, owners, entry, dry_run)

    def delete(self, resource: Resource, namespace: str, name: str, options: Mapping[str, Any]) -> Manifest:
        """In the foreground, what it owns goes first; an object with finalizers stays until they are taken away."""
        with self.changed:
            entry = self._entry(resource, namespace, name)
            uid = (options.get("preconditions") or {}).get("uid")
            if uid not in (None, entry.object["metadata"]["uid"]):
                message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": the UID in the precondition'
                raise Refusal(409, "Conflict", f"{message} ({uid}) does not match")
            metadata = entry.object["metadata"]
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            if options.get("propagationPolicy") == "Foreground":
                metadata["finalizers"] = [*metadata.get("finalizers", []), _FOREGROUND]
            self._record("MODIFIED", entry)
            self._collect()
            return self._shown(entry)

    def since(self, version: int, matches: Callable[[Key, Manifest], bool]) -> Iterator[tuple[int, str, Manifest]]:
        """Changes after `version`, oldest first."""
        with self.changed:
            for at, kind, key, changed in self.history:
                if at > version and matches(key, changed):
                    yield at, kind, changed

    def _put(
        self,
        resource: Resource,
        namespace: str,
        new: Manifest,
        managers: dict[str, frozenset[fields.Path]],
        entry: _Entry | None,
        dry_run: bool,
    ) -> Manifest:
        old = entry.object if entry else None
        metadata = new.setdefault("metadata", {})
        if resource.namespaced:
            metadata["namespace"] = namespace
        new = validated(resource, new, old)
        for admit in self.admission:
            if refusal := admit("UPDATE" if old else "CREATE", copy.deepcopy(new)):
                raise refusal
        if old is None:
            self._check_quota(resource, namespace, str(metadata["name"]))
            self._identify(new)
        if entry is not None and (new, managers) == (entry.object, entry.managers):
            return self._shown(entry)
        stored = _Entry(resource, new, managers)
        if dry_run:
            return self._shown(stored)
        if old is not None and old.get("spec") != new.get("spec"):
            new["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
        self._entries[self._key(resource, namespace, str(new["metadata"]["name"]))] = stored
        self._record("MODIFIED" if old else "ADDED", stored)
        self._collect()
        return self._shown(stored)

    def _check_quota(self, resource: Resource, namespace: str, name: str) -> None:
        limit = self.quota.get((namespace, resource.qualified))
        used = sum(1 for entry in self._entries.values() if entry.resource == resource)
        if limit is not None and used >= limit:
            what = f"count/{resource.qualified}"
            message = (
                f'{resource.qualified} "{name}" is forbidden: exceeded quota: team-quota, requested: {what}=1, '
                f"used: {what}={used}, limited: {what}={limit}"
            )
            raise Refusal(403, "Forbidden", message, kind=resource.plural)

    def _identify(self, new: Manifest) -> None:
        new["metadata"] |= {"uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
        new["metadata"].setdefault("resourceVersion", self.version)

    def _record(self, kind: str, entry: _Entry) -> None:
        self._version += 1
        entry.object["metadata"]["resourceVersion"] = self.version
        metadata = entry.object["metadata"]
        key = self._key(entry.resource, metadata.get("namespace", ""), metadata["name"])
        self.history.append((self._version, kind, key, self._shown(entry)))
        self.changed.notify_all()

    def _collect(self) -> None:
        """What may go does, until nothing more may: deletion marks travel down the owners, ends travel up."""
        while True:
            gone = [key for key, entry in self._entries.items() if self._may_go(entry)]
            if not gone:
                return
            for key in gone:
                entry = self._entries.pop(key)
                self._record("DELETED", entry)

    def _may_go(self, entry: _Entry) -> bool:
        metadata = entry.object["metadata"]
        if self._orphaned(metadata) and "deletionTimestamp" not in metadata:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self._record("MODIFIED", entry)
        if "deletionTimestamp" not in metadata:
            return False
        left = set(metadata.get("finalizers", []))
        if left == {_FOREGROUND}:
            return not any(
                owner["uid"] == metadata["uid"]
                for other in self._entries.values()
                for owner in other.object["metadata"].get("ownerReferences", [])
            )
        return not left

    def _orphaned(self, metadata: Mapping[str, Any]) -> bool:
        """Owned by something that is gone, or that is going in the foreground and has no other business left."""
        owners = {owner["uid"] for owner in metadata.get("ownerReferences", [])}
        alive = [entry.object["metadata"] for entry in self._entries.values()]
        waiting = {each["uid"] for each in alive if each.get("finalizers") == [_FOREGROUND]}
        return bool(owners) and (bool(owners & waiting) or not owners & {each["uid"] for each in alive})

    def _entry(self, resource: Resource, namespace: str, name: str) -> _Entry:
        entry = self._entries.get(self._key(resource, namespace, name))
        if entry is None:
            raise Refusal(404, "NotFound", f'{resource.qualified} "{name}" not found', kind=resource.plural)
        return entry

    def _key(self, resource: Resource, namespace: str, name: str) -> Key:
        return resource.qualified, namespace if resource.namespaced else "", name

    def _shown(self, entry: _Entry) -> Manifest:
        shown = copy.deepcopy(entry.object)
        shown["metadata"]["managedFields"] = [
            {"manager": name, "fields": sorted(fields.dotted(path) for path in owned)}
            for name, owned in sorted(entry.managers.items())
        ]
        return shown


def selected(manifest: Mapping[str, Any], selector: str) -> bool:
    """Equality and existence: "a=b,c"."""
    found = manifest["metadata"].get("labels") or {}
    for part in filter(None, selector.split(",")):
        key, equals, value = part.partition("=")
        if key not in found or (equals and found[key] != value.removeprefix("=")):
            return False
    return True
