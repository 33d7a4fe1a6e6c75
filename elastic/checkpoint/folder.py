"""A checkpoint by the address of its folder, which may be a copy; and the newest checkpoint in a run's folder."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from elastic.checkpoint.source import BytesRead, ReadRange
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.checkpoint.manifest import Manifest
from elastic.core.checkpoint.manifest_json import from_json
from elastic.core.errors import IntegrityError, UsageError
from elastic.store.objects import Objects
from elastic.store.open import open_objects

_MANIFEST = "manifest.json"
_README = """\
A checkpoint of ray-elastic: one safetensors file for each rank, and `manifest.json`, which lists the elements of each
tensor in each file. The weights in the format of another library (safetensors, hf, torch, dcp, deepspeed-universal):

    elastic export PATH_OF_THIS_FOLDER --to safetensors DIR

or in Python, with the path of this folder or a Ray Train Checkpoint:

    import elastic
    elastic.export(checkpoint, "DIR", to="safetensors")

To read it without ray-elastic: docs/checkpoints.md of ray-elastic describes the format.
"""


class CheckpointFolder:
    """The `CheckpointSource` of one folder: a manifest and the shards that it names."""

    name = "storage"

    def __init__(self, url: str, objects: Objects | None = None) -> None:
        self.url = url
        self._objects = objects if objects is not None else open_objects(url)

    def manifest(self, checkpoint_id: str = "") -> Manifest:
        """Raises IntegrityError when it is missing, damaged, or not of `checkpoint_id` ("" accepts any)."""
        manifest = from_json(self._objects.get(_MANIFEST))
        if checkpoint_id not in ("", manifest.id):
            raise IntegrityError(f"the checkpoint in {self.url} is {manifest.id}, not {checkpoint_id}")
        return manifest

    def read(self, manifest: Manifest, ranges: Sequence[ReadRange]) -> BytesRead:
        # Imported late: a README and a manifest need no torch.
        from elastic.checkpoint.reading import fetch, requests

        return BytesRead(storage=fetch(self._objects, "", requests(manifest, ranges, max_bytes=32 << 20), threads=8))


def explain(url: str) -> None:
    """Put a README into a checkpoint's folder, for readers without this package. Raises StorageError."""
    open_objects(url).put("README.md", [_README.encode()])


def is_checkpoint(url: str) -> bool:
    """Whether this is the folder of a checkpoint, or of a run that keeps its checkpoints in it."""
    names = open_objects(url).names("")
    return _MANIFEST in names or "checkpoints" in names


def open_folder(url: str) -> tuple[CheckpointFolder, Manifest]:
    """The checkpoint in this folder, or the newest one of the run if it is a run's folder.

    Raises UsageError if it is neither, IntegrityError or StorageError where it cannot be read.
    """
    url = url.rstrip("/") or url
    names = open_objects(url).names("")
    if _MANIFEST not in names:
        if "checkpoints" not in names:
            raise UsageError(f"{url} is neither the folder of a checkpoint (no {_MANIFEST}) nor that of a run")
        top, run = posixpath.split(url)
        newest = next(iter(CheckpointStore(top, run).list()), None)
        if newest is None:
            raise UsageError(f"the run in {url} has no complete checkpoint yet")
        url = f"{url}/checkpoints/{newest.id}"
    folder = CheckpointFolder(url)
    return folder, folder.manifest()
