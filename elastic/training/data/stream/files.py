"""Files as streams: lines of JSON or text, and tar files in WebDataset's form, below any fsspec URL."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from typing import IO, Any, cast

from elastic.core.errors import UsageError
from elastic.store.objects import Objects
from elastic.store.open import open_objects
from elastic.training.data.stream.striped import Striped

# Read at once: a request to S3 takes tens of milliseconds whatever its length.
_READ_BYTES = 1 << 20
# Of a sample, in WebDataset's form: its key up to the first dot of the name, and the ending. Files without a dot, and
# those of the format itself, are left out.
_SAMPLE_FILE = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")
_META_FILE = re.compile(r"__[^/]*__($|/)")
# Yields (document, where the next one begins): an open file and its place, both in bytes without compression.
_Parse = Callable[[IO[bytes], int], Iterator[tuple[Any, int]]]


@dataclass(frozen=True)
class Files:
    """An `open` for `elastic.data.stream`: the files below the folder `url` whose paths match `pattern`, sorted.

    Reader i of R reads files i, i + R, ... one after the other. `striped`: every reader reads all files and keeps every
    R-th document; for fewer files than readers. Files ending in .gz are decompressed.
    """

    url: str
    pattern: str
    parse: _Parse
    striped: bool = False

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Path and size of each file. Raises UsageError where there is none."""
        name = posixpath.basename(self.url.rstrip("/"))
        found = open_objects(self.url).sizes("")
        if not found and "." in name:
            raise UsageError(f"there are no files below {self.url}: give the folder, and pattern={name!r}")
        matching = {path: size for path, size in sorted(found.items()) if fnmatch(path, self.pattern)}
        if not matching:
            raise UsageError(f"of {len(found)} files below {self.url}, none matches the pattern {self.pattern!r}")
        return matching

    def fingerprint(self) -> str:
        listed = "\n".join(f"{path} {size}" for path, size in self.sizes.items())
        digest = hashlib.blake2b(listed.encode(), digest_size=6).hexdigest()
        return f"{len(self.sizes)} files of {sum(self.sizes.values())} bytes below {self.url} ({digest})"

    def check(self, readers: int) -> None:
        """Raises UsageError for fewer files than readers."""
        if not self.striped and len(self.sizes) < readers:
            raise UsageError(
                f"{len(self.sizes)} files below {self.url} cannot be shared between {readers} readers (one for each "
                "micro-batch of a step): use more files, a larger micro-batch, or striped=True, with which every "
                "reader reads all files and keeps its share"
            )

    def __call__(self, reader: int, readers: int) -> Any:
        if self.striped:
            return Striped(FileDocuments(self.url, list(self.sizes.items()), self.parse), reader, readers)
        return FileDocuments(self.url, list(self.sizes.items())[reader::readers], self.parse)


def jsonl(url: str, pattern: str = "*.jsonl*", striped: bool = False) -> Files:
    """One JSON value per line; empty lines are left out."""
    return Files(url, pattern, _json_lines, striped)


def text(url: str, pattern: str = "*.txt*", striped: bool = False) -> Files:
    """One line of UTF-8 per document, without its end; empty lines are left out."""
    return Files(url, pattern, _text_lines, striped)


def webdataset(url: str, pattern: str = "*.tar*", striped: bool = False) -> Files:
    """Tar files whose neighbours with one name up to the first dot are one sample: {"__key__": "a/0001", "jpg": bytes,
    "cls": bytes}. Nothing is decoded: that is for `transform`."""
    return Files(url, pattern, _tar_samples, striped)


class FileDocuments:
    """The documents of some files, one after the other. The state is the file and the byte of the next document."""

    def __init__(self, url: str, files: Sequence[tuple[str, int]], parse: _Parse) -> None:
        self._url, self._files, self._parse = url, files, parse
        self._file = self._begin = 0

    def state_dict(self) -> dict[str, int]:
        return {"file": self._file, "begin": self._begin}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._file, self._begin = state["file"], state["begin"]

    def __iter__(self) -> Iterator[Any]:
        # Here, since it may be in another process than the constructor.
        objects = open_objects(self._url)
        while self._file < len(self._files):
            path, size = self._files[self._file]
            raw: IO[bytes] = io.BufferedReader(_Ranges(objects, path, size), _READ_BYTES)
            with raw:
                file = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if path.endswith(".gz") else raw
                file.seek(self._begin)
                yield from self._documents(path, file)
            self._file, self._begin = self._file + 1, 0

    def _documents(self, path: str, file: IO[bytes]) -> Iterator[Any]:
        try:
            for document, end in self._parse(file, self._begin):
                self._begin = end
                yield document
        except (ValueError, tarfile.TarError, EOFError) as error:
            raise UsageError(f"{self._url}: {path} cannot be read from byte {self._begin} on: {error}") from error


class _Ranges(io.RawIOBase):
    """An object of a storage as a file: read in ranges, with the storage's own retries."""

    def __init__(self, objects: Objects, path: str, size: int) -> None:
        self._objects, self._path, self._size, self._at = objects, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._size - self._at)]
        if view:
            self._objects.read_into(self._path, self._at, [view])
            self._at += len(view)
        return len(view)


def _lines(file: IO[bytes], begin: int) -> Iterator[tuple[bytes, int]]:
    for line in file:
        begin += len(line)
        if line.strip():
            yield line, begin


def _json_lines(file: IO[bytes], begin: int) -> Iterator[tuple[Any, int]]:
    return ((json.loads(line), end) for line, end in _lines(file, begin))


def _text_lines(file: IO[bytes], begin: int) -> Iterator[tuple[str, int]]:
    return ((line.decode().rstrip("\r\n"), end) for line, end in _lines(file, begin))


def _tar_samples(file: IO[bytes], begin: int) -> Iterator[tuple[dict[str, Any], int]]:
    sample: dict[str, Any] = {}
    # Begins where the file stands; a member's offset is that of its header in the whole file.
    with tarfile.open(fileobj=file, mode="r:") as archive:
        while (member := archive.next()) is not None:
            # Of every member it has seen the archive keeps an entry: a shard of millions would fill the memory.
            archive.members = []  # type: ignore[attr-defined]
            named = _SAMPLE_FILE.match(member.name)
            if named is None or not member.isfile() or _META_FILE.match(member.name):
                continue
            key, ending = named[1], named[2].lower()
            if sample and sample["__key__"] != key:
                yield sample, member.offset
                sample = {}
            if ending in sample:
                raise tarfile.ReadError(f"it has two files {member.name!r}")
            content = archive.extractfile(member)
            assert content is not None
            sample = {**(sample or {"__key__": key}), ending: content.read()}
        end = archive.offset
    file.seek(end)
    if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
        # The module takes a header that is cut off for the end.
        raise tarfile.ReadError("it is damaged or cut off")
    if sample:
        yield sample, end
