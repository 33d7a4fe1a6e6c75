"""The driver of a run inside a Ray job: `python -m elastic_jobs.submit.driver JOB.yaml --run-id ID ...`, started by
`elastic submit`.

It attaches to the run's controller if that is alive; otherwise it starts one, from the newest checkpoint if there is
one. Then it reports progress until the run ends. SIGTERM (how Ray stops a job) ends the run as planned. A killed
driver does not affect the run: the controller is detached, and the next attempt attaches to it. The next attempt is
submitted by the run's supervisor (`elastic_jobs.submit.supervisor`), which the first driver starts, or by any follower
of the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from elastic.core.checkpoint.recut import change_of_slices
from elastic.core.errors import ElasticError, NobodyAnswers, RunNotFound, StorageError, UsageError
from elastic.core.run.phase import FINISHED, NOT_FINISHED, STOPPED, USAGE
from elastic.core.secrets import redact, secret_values
from elastic.entrypoint import parse_entry_point
from elastic.observe.journal import JournalReader
from elastic.observe.summary import summarize
from elastic.observe.text import clean
from elastic.runtime import handed_environment
from elastic_jobs.display import LineDisplay
from elastic_jobs.exit_codes import DRIVER_BLIND, DRIVER_LOST, STATUSES, exit_code
from elastic_jobs.job_file.checks import check_new_end, check_seed, check_storage, is_done
from elastic_jobs.job_file.load import load_job
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.backend import Backend, SupervisorLike
from elastic_jobs.running.follow import conclude
from elastic_jobs.running.handle import STOP_AGAIN_S, RunHandle
from elastic_jobs.running.live import Live, forget_live, write_live
from elastic_jobs.running.run_plan import Job, Output
from elastic_jobs.submit import driver_protocol
from elastic_jobs.submit.driver_command import DriverCommand
from elastic_jobs.submit.package import digest, entry_file
from elastic_jobs.terminal import put, say

# How soon a stop is forwarded.
_REFRESH_S = 0.5
# A month of these lines is a few megabytes; a supervisor or follower reads them again after a lost connection.
_STEP_LINE_S = 60.0

Result = Mapping[str, Any]


class StopRequest:
    """Set by SIGTERM. Ray replaces handlers while it connects, so the signal is blocked until ours is installed."""

    def __init__(self) -> None:
        self.wanted = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        # An earlier thread has not blocked the signal and may receive it.
        signal.signal(signal.SIGTERM, self._take)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, self._take)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _take(self, number: int, frame: object) -> None:
        self.wanted = True


class Driver:
    """One attempt. `drive` returns the exit code of the run, or DRIVER_LOST or DRIVER_BLIND."""

    def __init__(
        self, command: DriverCommand, backend: Backend, stop: StopRequest, address: str, submitted: bool = False
    ) -> None:
        """`submitted`: this is an attempt of `elastic submit`, and another is submitted if it is lost."""
        self._command = command
        self._submitted = submitted
        self._supervisor: SupervisorLike | None = None
        self._backend = backend
        self._stop = stop
        self._address = address
        self._folder = RunFolder(command.storage, command.run_id)
        self._secrets = secret_values(os.environ)

    def drive(self) -> int:
        """Raises ElasticError only before the run is reached, when nothing has been started."""
        try:
            handle = self._attach()
            # The controller of an ended run stays for some minutes to answer queries.
            mine = handle is not None and (self._command.mode in ("continue", "stop") or handle.result(0.0) is None)
        except NobodyAnswers as error:
            # This process is on a node of the cluster, so the head is away.
            return self._lost("does not reach its run", error)
        except UsageError:
            raise
        except ElasticError as error:
            return self._lost("does not reach its run", error)
        if handle is not None and mine:
            return self._follow(handle, "attached")
        try:
            return self._without_controller()
        except StorageError as error:
            if self._command.attempt == 1 or self._command.mode not in ("continue", "stop"):
                raise
            return self._lost("found no controller, and cannot read the state of its run", error, DRIVER_BLIND)

    def _without_controller(self) -> int:
        if self._command.mode == "stop":
            return self._tell(self._ended() or {"status": STOPPED, "reason": "no controller of the run was left"})
        ended = self._ended()
        if self._command.mode == "continue" and ended is not None and ended.get("status") in (FINISHED, STOPPED):
            return self._tell(ended)
        if self._command.mode == "resume" and ended is not None:
            check_new_end(self._command.run_id, ended, self._command.max_steps)
            if is_done(ended, self._command.max_steps):
                return self._tell(ended)
        return self._start()

    def _attach(self) -> RunHandle | None:
        with self._stop.held():
            try:
                return self._backend.attach_run(self._command.run_id, self._address)
            except RunNotFound:
                return None

    def _start(self) -> int:
        if self._stop.wanted:
            return self._tell({"status": STOPPED, "reason": "stopped before the run was started"})
        job = check_job(self._command, self._folder)
        how = "started" if self._folder.read("job.json") is None else "resumed"
        # The supervisor before the run: whatever is lost in between, the run is started.
        self._ensure_supervisor()
        self._folder.write("job.json", job.record())
        # Before the run starts, so that a failure here has started nothing.
        write_live(self._folder, Live(self._address))
        try:
            handle = self._backend.start_run(job, self._address)
        except UsageError:
            # Another driver was faster: the controller's name is unique. Follow its run.
            try:
                found = self._attach()
            except ElasticError as error:
                return self._lost("does not reach its run", error)
            if found is None:
                forget_live(self._folder)
                raise
            return self._follow(found, "attached")
        return self._follow(handle, how)

    def _ensure_supervisor(self) -> None:
        if self._submitted and self._supervisor is None:
            self._supervisor = self._backend.supervisor(self._command.run_id, self._command.attempt)
        if self._supervisor is not None:
            self._supervisor.ensure()

    def _lost(self, what: str, error: ElasticError, code: int = DRIVER_LOST) -> int:
        """The run may still be running; only a new attempt can find out."""
        say(f"this driver {what}: {clean(str(error))}")
        return code

    def _follow(self, handle: RunHandle, how: str) -> int:
        put(driver_protocol.began(self._command.run_id, self._command.attempt, how))
        say(f"run {self._command.run_id}, attempt {self._command.attempt}: {how}")
        try:
            result = self._until_end(handle)
        except ElasticError as error:
            return self._lost("has lost its run", error)
        forget_live(self._folder)
        return self._tell(result)

    def _until_end(self, handle: RunHandle) -> Result:
        display, told_at = LineDisplay(sys.stderr, step_line_s=_STEP_LINE_S), 0.0
        if self._command.mode == "stop":
            self._stop.wanted = True
        while True:
            self._ensure_supervisor()
            display.update(self._for_the_log(handle.progress()))
            if self._stop.wanted and (not told_at or time.monotonic() - told_at >= STOP_AGAIN_S):
                if not told_at:
                    display.note("the job is being stopped: a last checkpoint, then the end")
                told_at = time.monotonic()
                handle.stop("the job was stopped")
            result = handle.result(_REFRESH_S)
            if result is not None:
                return result

    def _ended(self) -> Result | None:
        """How the run ended according to its journal; None if it has not ended or never began."""
        try:
            summary = summarize(JournalReader(self._folder.url, self._folder.run_id).records())
        except RunNotFound:
            return None
        status = summary.get("status")
        return {**summary, "step": summary.get("steps")} if status in STATUSES else None

    def _tell(self, result: Result) -> int:
        """The report for people, then the line for programs."""
        result = self._for_the_log(result)
        code = conclude(self._folder, result, Output())
        status, reason = str(result.get("status")), clean(result.get("reason") or "")
        put(driver_protocol.ended(self._command.run_id, status, code, result.get("step"), reason))
        return code

    def _for_the_log(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """Without secrets: the sentences quote errors of user code, and many people may read a job's log."""
        return {**told, **{key: redact(str(told[key]), self._secrets) for key in ("doing", "reason") if told.get(key)}}


def check_job(command: DriverCommand, folder: RunFolder) -> Job:
    """The job as the command wants it, checked as far as a node of the cluster can.

    Raises UsageError or StorageError.
    """
    file = Path(command.job)
    spec = load_job(file, storage_url=command.storage, max_steps=command.max_steps)
    if command.mode == "new" and folder.read("job.json") is not None:
        raise UsageError(
            f"there is a run {command.run_id!r} in {folder.url} already; continue it with `elastic resume`, or submit "
            "under another --run-id"
        )
    check_code(spec.entry_point, file.absolute().parent, command.code)
    if command.mode == "resume":
        # A mistake in the storage's address must not start a new run under the old name.
        folder.job_record()
    job = spec.job(file, command.run_id)
    check_entry_is_ours(spec.entry_point, file.absolute().parent, Path.cwd())
    before = (folder.read("job.json") or {}).get("settings")
    if before is not None:
        check_seed(command.run_id, before.get("seed"), job.settings.seed)
        mesh, now = before.get("mesh") or {}, job.settings.mesh.tp_sizes
        sizes = tuple((mesh.get("choices") or {}).get("tp") or [mesh.get("tp", 1)])
        if sizes != now:
            say(f"run {command.run_id}: {change_of_slices(sizes, now)}")
    check_storage(job.settings)
    return job


def check_entry_is_ours(entry_point: str, folder: Path, package: Path) -> None:
    """Raises UsageError for an entry point outside the package, whatever is installed on this node."""
    entry = parse_entry_point(entry_point, folder)
    base = Path(entry.target) if entry.is_file else folder / entry.target.replace(".", "/")
    found = [base] if entry.is_file else [base.with_name(f"{base.name}.py"), base / "__init__.py"]
    if not any(path.is_file() and path.resolve().is_relative_to(package.resolve()) for path in found):
        raise UsageError(f"entry point {entry_point!r} is not in the submitted package")


def check_code(entry_point: str, folder: Path, expected: str | None) -> None:
    """Raises UsageError where an image holds another entry point than the folder that the run was rendered from."""
    if expected is not None and digest(file := entry_file(folder, entry_point)) != expected:
        raise UsageError(
            f"{file} in the image is not the file that this run was rendered from: build the image again, or render "
            "the run from the code that the image holds"
        )


def check_version(command: DriverCommand) -> None:
    """Raises UsageError where submitter and cluster have different releases of ray-elastic."""
    here = metadata.version("ray-elastic")
    if command.version != here:
        raise UsageError(
            f"the job was submitted by ray-elastic {command.version}, and the cluster has {here}: install the same "
            "release on both sides"
        )


def main(words: list[str] | None = None, backend: Backend | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        command = DriverCommand.of_words(words)
        check_version(command)
        address = os.environ.get("RAY_ADDRESS", "auto")
        handed_environment.take(address)
        return Driver(command, backend or _real(), StopRequest(), address, command.was_submitted(os.environ)).drive()
    except ElasticError as error:
        say(f"elastic driver: {clean(str(error))}")
        put(driver_protocol.ended(_run_id(words), _status(error), error.exit_code, None, clean(str(error))))
        return error.exit_code


def _status(error: ElasticError) -> str:
    return USAGE if error.exit_code == exit_code(USAGE) else NOT_FINISHED


def _run_id(words: list[str] | None) -> str:
    given = sys.argv[1:] if words is None else words
    return given[given.index("--run-id") + 1] if "--run-id" in given[:-1] else ""


def _real() -> Backend:
    from elastic_jobs.running.ray_backend import RayBackend

    return RayBackend()


if __name__ == "__main__":
    sys.exit(main())
