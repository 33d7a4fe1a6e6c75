"""Where runs live: <storage>/<run id>/, with the job beside the journal, so that a run id is enough to resume it."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from elastic.core.errors import RunNotFound, StorageError, UsageError
from elastic.core.names import check_run_id

DEFAULT = "./runs"
ENVIRONMENT = "ELASTIC_STORAGE"


def absolute_url(url: str, folder: str | Path) -> str:
    """Local paths made absolute from `folder`, since workers run elsewhere; other URLs as they are."""
    if "://" in url or "::" in url:
        return url
    return os.path.normpath(Path(folder).absolute() / Path(url).expanduser())


def default_storage(argument: str | None) -> str:
    """The argument, else the environment's address, else ./runs."""
    return absolute_url(argument or os.environ.get(ENVIRONMENT) or DEFAULT, ".")


def new_run_id(name: str, now: float) -> str:
    """`<name>-<UTC time>-<random>`, with whatever a run id may not hold replaced by '-'."""
    clean = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:60] or "run"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return check_run_id(f"{clean}-{stamp}-{secrets.token_hex(2)}")


class RunFolder:
    """One run's small files in storage. Raises UsageError for a URL that no file system knows, else StorageError."""

    def __init__(self, url: str, run_id: str) -> None:
        self.url = url
        self.run_id = check_run_id(run_id)
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UsageError(f"storage {url!r} cannot be used: {error}") from error
        self._folder = f"{str(root).rstrip('/')}/{run_id}"

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """Raises StorageError, so that storage that cannot be written is known before any node is asked for."""
        try:
            self._fs.makedirs(self._folder, exist_ok=True)
            self._fs.pipe_file(f"{self._folder}/{name}", json.dumps(data, indent=2).encode())
        except OSError as error:
            raise self._failed("written", error) from error

    def read(self, name: str) -> dict[str, Any] | None:
        """None where the file does not exist or is not whole."""
        try:
            data = json.loads(self._fs.cat_file(f"{self._folder}/{name}"))
        except FileNotFoundError:
            return None
        except ValueError:
            return None
        except OSError as error:
            raise self._failed("read", error) from error
        return data if isinstance(data, dict) else None

    def remove(self, name: str) -> None:
        try:
            self._fs.rm_file(f"{self._folder}/{name}")
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._failed("written", error) from error

    def local_path(self, name: str) -> str | None:
        """Where a file of the run lies on this machine; None for storage elsewhere."""
        return f"{self._folder}/{name}" if isinstance(self._fs, LocalFileSystem) else None

    def job(self) -> dict[str, Any]:
        """The job as it was started. Raises RunNotFound."""
        job = self.read("job.json")
        if job is None:
            raise RunNotFound(f"there is no run {self.run_id!r} in {self.url}{self._others()}")
        return job

    def _others(self) -> str:
        try:
            listed = self._fs.ls(self._folder.rsplit("/", 1)[0], detail=False)
        except OSError:
            return "; say where with --storage"
        names = sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in listed)
        return f"; runs there: {', '.join(names[-5:])}" if names else "; say where with --storage"

    def _failed(self, what: str, error: OSError) -> StorageError:
        return StorageError(f"storage {self.url!r} cannot be {what}: {error.strerror or error}")
