"""Where runs live: <storage>/<run id>/, with the job beside the journal, so that a run id is enough to resume it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic.core.errors import ElasticError, IntegrityError, RunNotFound, StorageError, UsageError
from elastic.core.names import check_run_id
from elastic.core.secrets import check_url
from elastic.store.address import local_root
from elastic.store.open import open_objects

DEFAULT = "./runs"
ENVIRONMENT = "ELASTIC_STORAGE"
# Somebody sits before the screen and waits for an answer.
_TIMEOUT_S = 60.0


def absolute_url(url: str, folder: str | Path) -> str:
    """Local paths made absolute from `folder`, since workers run elsewhere; other URLs as they are.

    Raises UsageError for an address that holds credentials.
    """
    if "://" in url or "::" in url:
        return check_url(url)
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
    """One run's small files in storage. Raises UsageError where address or rights are wrong, else StorageError."""

    def __init__(self, url: str, run_id: str) -> None:
        self.url = url
        self.run_id = check_run_id(run_id)
        self._objects = open_objects(url, _TIMEOUT_S)

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """So that storage that cannot be written is known before any node is asked for."""
        with self._named("written"):
            self._objects.put(f"{self.run_id}/{name}", [json.dumps(data, indent=2).encode()])

    def claim(self, job: Mapping[str, Any]) -> None:
        """Writes the job of a run that is not there yet; of several at one instant one alone. Raises UsageError.

        Where storage has no conditional write two may both succeed: see `elastic.store.objects`.
        """
        # Two that ask for the same must not take each other's claim for their own.
        data = {**job, "claim": secrets.token_hex(8)}
        try:
            with self._named("written"):
                self._objects.create(f"{self.run_id}/job.json", json.dumps(data, indent=2).encode())
        except IntegrityError as error:
            raise self.taken() from error

    def taken(self) -> UsageError:
        return UsageError(f"there is a run {self.run_id!r} in {self.url} already; go on with it by `elastic resume`")

    def read(self, name: str) -> dict[str, Any] | None:
        """None where the file does not exist or is not whole."""
        try:
            with self._named("read"):
                data = json.loads(self._objects.get(f"{self.run_id}/{name}"))
        except (IntegrityError, ValueError):
            return None
        return data if isinstance(data, dict) else None

    def remove(self, name: str) -> None:
        with self._named("written"):
            self._objects.remove([f"{self.run_id}/{name}"])

    def local_path(self, name: str) -> str | None:
        """Where a file of the run lies on this machine; None for storage elsewhere."""
        root = local_root(self.url)
        return None if root is None else f"{root.rstrip('/')}/{self.run_id}/{name}"

    def job(self) -> dict[str, Any]:
        """The job as it was started. Raises RunNotFound."""
        job = self.read("job.json")
        if job is None:
            raise RunNotFound(f"there is no run {self.run_id!r} in {self.url}{self._others()}")
        return job

    def _others(self) -> str:
        try:
            names = self._objects.names("")
        except ElasticError:
            return "; say where with --storage"
        return f"; runs there: {', '.join(names[-5:])}" if names else "; say where with --storage"

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (StorageError, UsageError) as error:
            raise type(error)(f"storage {self.url!r} cannot be {what}: {error.message}") from error
