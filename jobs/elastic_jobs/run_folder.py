"""The folder of a run, <storage>/<run id>/: it holds the job and the journal, so a run id is enough to resume it."""

from __future__ import annotations

import contextlib
import difflib
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
from elastic.store.local import path_below
from elastic.store.open import open_objects
from elastic_jobs.running.run_plan import Job
from elastic_jobs.signing import key_from_environment, sign, verified

DEFAULT = "./runs"
ENVIRONMENT = "ELASTIC_STORAGE"
# A person is waiting for the answer.
_TIMEOUT_S = 60.0


def absolute_url(url: str, folder: str | Path) -> str:
    """Makes local paths absolute from `folder`, because workers run elsewhere; other URLs stay as they are.

    Raises UsageError for an address that holds credentials, and for memory:// (private to one process).
    """
    if url.startswith("memory:"):
        raise UsageError(f"storage {url!r} is the memory of one process, so no other process of the run would see it")
    if "://" in url or "::" in url:
        return check_url(url)
    return os.path.normpath(Path(folder).absolute() / Path(url).expanduser())


def default_storage(argument: str | None) -> str:
    """The argument, else the environment's address, else ./runs."""
    return absolute_url(argument or os.environ.get(ENVIRONMENT) or DEFAULT, ".")


def new_run_id(name: str, now: float) -> str:
    """`<name>-<UTC time>-<random>`, with characters that a run id may not hold replaced by '-'."""
    clean = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:60] or "run"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return check_run_id(f"{clean}-{stamp}-{secrets.token_hex(2)}")


class RunFolder:
    """The small files of one run in storage. Raises UsageError for a wrong address or missing rights, else
    StorageError.

    With a signing key in the environment (`elastic_jobs.signing`) all files are signed, and reading one that is not
    raises UsageError.
    """

    def __init__(self, url: str, run_id: str) -> None:
        self.url = url
        self.run_id = check_run_id(run_id)
        self._objects = open_objects(url, _TIMEOUT_S)
        self._key = key_from_environment()

    @property
    def signed(self) -> bool:
        """Whether the files that are read are signed with the operator's key."""
        return self._key is not None

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all."""
        with self._named("written"):
            self._objects.put(f"{self.run_id}/{name}", [self._text(name, data)])

    def claim(self, job: Mapping[str, Any]) -> None:
        """Write the job of a new run; only one of several concurrent claims succeeds. Raises UsageError.

        Without conditional writes in the storage, two may both succeed: see `elastic.store.objects`.
        """
        # Two launchers with the same job must not take each other's claim for their own.
        data = {**job, "claim": secrets.token_hex(8)}
        try:
            with self._named("written"):
                self._objects.create(f"{self.run_id}/job.json", self._text("job.json", data))
        except IntegrityError as error:
            raise self.taken() from error

    def taken(self) -> UsageError:
        return UsageError(
            f"there is a run {self.run_id!r} in {self.url} already; continue it with `elastic resume`, or take another "
            "--run-id"
        )

    def read(self, name: str, *, unsigned: bool = False) -> dict[str, Any] | None:
        """None if the file does not exist or is incomplete. `unsigned`: also one without the right signature."""
        try:
            with self._named("read"):
                data = json.loads(self._objects.get(f"{self.run_id}/{name}"))
        except (IntegrityError, ValueError):
            return None
        if not isinstance(data, dict):
            return None
        return verified(None if unsigned else self._key, self.run_id, name, data)

    def remove(self, name: str) -> None:
        with self._named("written"):
            self._objects.remove([f"{self.run_id}/{name}"])

    def texts(self, folder: str) -> Iterator[tuple[str, str]]:
        """Name and text of each object directly below a folder of the run, by name."""
        with self._named("read"):
            for name in self._objects.names(f"{self.run_id}/{folder}"):
                yield name, self._objects.get(f"{self.run_id}/{folder}/{name}").decode(errors="replace")

    def local_path(self, name: str) -> str | None:
        """The path of a file of the run on this machine; None for remote storage.

        Raises IntegrityError if a symbolic link leads out of the storage.
        """
        root = local_root(self.url)
        return None if root is None else path_below(root, f"{self.run_id}/{name}")

    def read_job(self, *, unsigned: bool = False) -> Job:
        """The job as it was started. Raises RunNotFound, and IntegrityError if job.json holds something else."""
        return Job.from_json(self.job_record(unsigned=unsigned))

    def job_record(self, *, unsigned: bool = False) -> dict[str, Any]:
        """The content of job.json. Raises RunNotFound, and IntegrityError if it is truncated or not JSON."""
        job = self.read("job.json", unsigned=unsigned)
        if job is None:
            with self._named("read"):
                damaged = "job.json" in self._objects.names(self.run_id)
            if damaged:
                raise IntegrityError(
                    f"job.json of run {self.run_id!r} in {self.url} is damaged; its journal and its checkpoints are "
                    "not: remove that file, then `elastic run JOB.yaml --run-id "
                    f"{self.run_id}` continues from the newest checkpoint"
                )
            raise RunNotFound(f"there is no run {self.run_id!r} in {self.url}{self._others()}")
        return job

    def _text(self, name: str, data: Mapping[str, Any]) -> bytes:
        return json.dumps(sign(self._key, self.run_id, name, data), indent=2).encode()

    def _others(self) -> str:
        try:
            names = self._objects.names("")
        except ElasticError:
            return "; name its storage with --storage"
        near = difflib.get_close_matches(self.run_id, names, n=1, cutoff=0.6)
        if near:
            return f"; did you mean {near[0]!r}?"
        return f"; runs there: {', '.join(names[-5:])}" if names else "; name its storage with --storage"

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (StorageError, UsageError) as error:
            raise type(error)(f"storage {self.url!r} cannot be {what}: {error.message}") from error
