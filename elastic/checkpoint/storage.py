"""The storage tier: checkpoints of one run below any fsspec URL.

    <url>/<run_id>/checkpoints/step-00000040-g0003/rank-00000-of-00004.safetensors
                                                  /manifest.json

A folder with a manifest is a checkpoint. Every rank writes its shard first; one process writes the manifest last. The
folder's name holds generation and step, so that a late writer of an old generation cannot touch a newer checkpoint.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import xxhash

from elastic.checkpoint.source import BytesRead, ReadRange
from elastic.core.checkpoint.manifest import Manifest, ShardRecord
from elastic.core.checkpoint.manifest_json import from_json, to_json
from elastic.core.errors import Fenced, IntegrityError, StorageError, UsageError, Where
from elastic.core.names import CheckpointRef, check_run_id, checkpoint_id, parse_checkpoint_id, shard_file
from elastic.store.local import LocalObjects
from elastic.store.objects import TIMEOUT_S, Objects
from elastic.store.open import open_objects

if TYPE_CHECKING:
    from elastic.checkpoint.snapshot import ShardSnapshot

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_VERIFY_BYTES = 16 << 20


class CheckpointStore:
    """Checkpoints of one run; the `CheckpointSource` called "storage". Methods may be called from any thread.

    `read_threads` reads run at once, none longer than `max_read_bytes`. `max_gap_bytes` is how many
    unneeded bytes may be read to save a request; by default 0 on a local disk. `timeout_s` bounds each request.
    """

    def __init__(
        self,
        url: str,
        run_id: str,
        *,
        objects: Objects | None = None,
        read_threads: int = 8,
        max_read_bytes: int = 32 << 20,
        max_gap_bytes: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.url = url
        self.run_id = check_run_id(run_id)
        self._objects = objects if objects is not None else open_objects(url, timeout_s)
        self._read_threads = read_threads
        self._max_read_bytes = max_read_bytes
        local = isinstance(self._objects, LocalObjects)
        self._max_gap_bytes = max_gap_bytes if max_gap_bytes is not None else 0 if local else 64 << 10

    @property
    def name(self) -> str:
        return "storage"

    @property
    def folder(self) -> str:
        """Of the run, as a URL."""
        return f"{self.url.rstrip('/')}/{self.run_id}"

    def check_writable(self) -> None:
        """Write, read and remove a small object. Raises UsageError or StorageError with the reason."""
        probe, data = f"{self.run_id}/probe-{uuid.uuid4().hex}", b"ray-elastic can write here"
        try:
            self._objects.put(probe, [data])
            found = self._objects.get(probe)
            self._objects.remove([probe])
        except UsageError as error:
            raise UsageError(f"checkpoints cannot be kept at {self.url!r}: {error.message}") from error
        except (StorageError, IntegrityError) as error:
            raise StorageError(f"checkpoints cannot be kept at {self.url!r}: {error.message}") from error
        if found != data:
            raise StorageError(f"checkpoints cannot be kept at {self.url!r}: it returns other bytes than were written")

    def checkpoint_id(self, step: int, generation: int) -> str:
        return checkpoint_id(step, generation)

    def write_shard(self, snapshot: ShardSnapshot) -> ShardRecord:
        """Write one rank's file; durable when this returns. May be repeated: the bytes are the same each time.

        Raises Fenced when the checkpoint is committed already: nothing may change below a manifest.
        """
        # Imported late, here and in `read`: listing, committing and removing need no torch, which takes a second to
        # import. The controller does only these, and so does every process that gets a handle of it.
        from elastic.checkpoint.shards import ShardStream

        where = Where(rank=snapshot.rank, step=snapshot.step, generation=snapshot.generation)
        if snapshot.run_id != self.run_id:
            raise UsageError(f"a snapshot of run {snapshot.run_id!r} cannot be kept with run {self.run_id!r}", where)
        folder = self._folder(checkpoint_id(snapshot.step, snapshot.generation))
        stream = ShardStream(snapshot)
        if self._is_committed(folder):
            raise Fenced("this checkpoint is committed already and takes no more shards", where)
        self._objects.put(f"{folder}/{shard_file(snapshot.rank, snapshot.world_size)}", stream)
        return stream.record()

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, which completes the checkpoint.

        Raises IntegrityError if a shard is missing or short, or if the id is taken.
        """
        folder = self._folder(manifest.id)
        if manifest.run_id != self.run_id:
            raise UsageError(f"a checkpoint of run {manifest.run_id!r} cannot be kept with run {self.run_id!r}")
        text = _read_back(manifest)
        self._check_shards(folder, manifest)
        # The same manifest may be committed again: the answer to the first attempt may have been lost.
        self._objects.create(f"{folder}/{_MANIFEST}", text.encode())
        try:
            # Another controller may have abandoned the folder between the check and the creation.
            self._check_shards(folder, manifest)
        except IntegrityError:
            self._objects.remove([f"{folder}/{_MANIFEST}"])
            raise
        logger.info("checkpoint %s is complete: %d shards", manifest.id, len(manifest.shards))

    def _check_shards(self, folder: str, manifest: Manifest) -> None:
        sizes = self._objects.sizes(folder)
        for shard in manifest.shards:
            found = sizes.get(f"{folder}/{shard.file}")
            if found != shard.bytes:
                what = "is missing" if found is None else f"has {found} bytes"
                raise IntegrityError(
                    f"{manifest.id}/{shard.file} of {shard.bytes} bytes {what}", Where(rank=shard.rank)
                )

    def list(self) -> tuple[CheckpointRef, ...]:
        """The complete checkpoints, newest first."""
        return tuple(sorted((ref for ref, complete in self._found(False).items() if complete), reverse=True))

    def incomplete(self) -> tuple[CheckpointRef, ...]:
        """Folders without a manifest, newest first: being written, abandoned, or half deleted."""
        return tuple(sorted((ref for ref, complete in self._found(True).items() if not complete), reverse=True))

    def manifest(self, checkpoint_id: str) -> Manifest:
        """Raises IntegrityError when it is missing, damaged, or of another checkpoint."""
        manifest = from_json(self._objects.get(f"{self._folder(checkpoint_id)}/{_MANIFEST}"))
        if (manifest.id, manifest.run_id) != (checkpoint_id, self.run_id):
            raise IntegrityError(f"the manifest in {checkpoint_id} is that of {manifest.run_id}/{manifest.id}")
        return manifest

    def read(self, manifest: Manifest, ranges: Sequence[ReadRange]) -> BytesRead:
        """Fill all targets in parallel; returns the bytes fetched. The bytes are verified later, by the digests."""
        from elastic.checkpoint.reading import fetch, requests

        reads = requests(manifest, ranges, max_bytes=self._max_read_bytes, max_gap_bytes=self._max_gap_bytes)
        return BytesRead(storage=fetch(self._objects, self._folder(manifest.id), reads, self._read_threads))

    def verify_shards(self, manifest: Manifest) -> int:
        """Read every byte of every shard; returns the number. Raises IntegrityError naming the first damaged shard."""
        folder = self._folder(manifest.id)
        buffer = bytearray(_VERIFY_BYTES)
        sizes = self._objects.sizes(folder)
        for shard in manifest.shards:
            path, hashed = f"{folder}/{shard.file}", xxhash.xxh3_64()
            for begin in range(0, shard.bytes, _VERIFY_BYTES):
                view = memoryview(buffer)[: min(_VERIFY_BYTES, shard.bytes - begin)]
                self._objects.read_into(path, begin, [view])
                hashed.update(view)
            if hashed.hexdigest() != shard.xxh3 or sizes.get(path, shard.bytes) != shard.bytes:
                raise IntegrityError(f"{manifest.id}/{shard.file} is not what was written", Where(rank=shard.rank))
        return sum(shard.bytes for shard in manifest.shards)

    def delete(self, checkpoint_id: str) -> None:
        """Delete the manifest first: without it the folder is not a checkpoint, even if deleting the rest fails."""
        folder = self._folder(checkpoint_id)
        self._objects.remove([f"{folder}/{_MANIFEST}"])
        self._objects.remove(sorted(self._objects.sizes(folder, unfinished=True)))

    def abandon(self, checkpoint_id: str) -> None:
        """Remove the shards of a checkpoint that will never be complete. Raises IntegrityError for a complete one."""
        folder = self._folder(checkpoint_id)
        paths = sorted(self._objects.sizes(folder, unfinished=True))
        if f"{folder}/{_MANIFEST}" in paths:
            raise IntegrityError(f"checkpoint {checkpoint_id} is complete: delete it instead of abandoning it")
        self._objects.remove(paths)
        if self._is_committed(folder):
            # The manifest was created meanwhile: without its shards it must not count as a checkpoint.
            self._objects.remove([f"{folder}/{_MANIFEST}"])

    def _is_committed(self, folder: str) -> bool:
        # One byte instead of a listing: a thousand ranks ask this about a folder of a thousand files.
        try:
            self._objects.read_into(f"{folder}/{_MANIFEST}", 0, [memoryview(bytearray(1))])
        except IntegrityError:
            return False
        return True

    def _found(self, unfinished: bool) -> dict[CheckpointRef, bool]:
        """Every checkpoint folder, and whether it has a manifest; `unfinished` includes uploads that never ended."""
        top = f"{self.run_id}/checkpoints"
        found: dict[CheckpointRef, bool] = {}
        for path in self._objects.sizes(top, unfinished=unfinished):
            folder, _, file = path[len(top) + 1 :].partition("/")
            try:
                ref = parse_checkpoint_id(folder)
            except IntegrityError:
                continue  # a foreign file
            found[ref] = found.get(ref, False) or file == _MANIFEST
        return found

    def _folder(self, checkpoint_id: str) -> str:
        return f"{self.run_id}/checkpoints/{parse_checkpoint_id(checkpoint_id).id}"


def _read_back(manifest: Manifest) -> str:
    """The manifest's JSON. Raises IntegrityError unless reading it gives an equal manifest."""
    text = to_json(manifest)
    found = from_json(text)
    # Tuples in `extra_state` become lists, and NaN is not equal to itself: the texts are compared.
    same = replace(found, extra_state={}) == replace(manifest, extra_state={})
    if not same or to_json(found) != text:
        raise IntegrityError(f"the manifest of {manifest.id} would not be read as it was written")
    return text
