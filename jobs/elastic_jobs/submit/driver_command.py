"""The command line of a run's driver inside a Ray job: made by the submitter, read by `elastic_jobs.submit.driver`.

It holds everything that an attempt needs, so that the next attempt is the same command with another number and mode.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

from elastic.core.errors import UsageError
from elastic.core.names import check_run_id
from elastic_jobs.submit import attempts

# new: refuse a run that is in storage. continue: attach to the controller, else continue from storage, else start; of a
# run that has finished or was stopped, report that. resume: continue also then. stop: attach and stop.
Mode = Literal["new", "continue", "resume", "stop"]
# `exec` replaces the shell, so that Ray's signals reach the driver, and its exit code is the job's.
_PREFIX = ["exec", "python", "-m", "elastic_jobs.submit.driver"]

# The variable in which Ray's job supervisor describes the job to its driver (2.60).
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@dataclass(frozen=True)
class DriverCommand:
    """`job` is the job file's path in the package; `version` is that of ray-elastic on the submitter's machine; `code`
    is the SHA-256 of the entry point's file there, where an image holds the code and may hold another one."""

    job: str
    run_id: str
    attempt: int
    mode: Mode
    storage: str
    version: str
    max_steps: int | None = None
    code: str | None = None

    def line(self) -> str:
        words = [*_PREFIX, self.job, "--run-id", self.run_id, "--attempt", str(self.attempt), "--mode", self.mode]
        words += ["--storage", self.storage, "--client-version", self.version]
        if self.max_steps is not None:
            words += ["--max-steps", str(self.max_steps)]
        if self.code is not None:
            words += ["--code", self.code]
        return shlex.join(words)

    def was_submitted(self, environment: Mapping[str, str]) -> bool:
        """Whether the process of this environment is the job of this attempt, sent by `elastic submit` or after it.

        KubeRay's own jobs do not name their run in their metadata, and KubeRay itself retries them.
        """
        try:
            about = json.loads(environment.get(_JOB_CONFIG, "{}")).get("metadata")
        except ValueError:
            return False
        return attempts.identity(about) == (self.run_id, self.attempt)

    @classmethod
    def of_line(cls, line: str) -> DriverCommand:
        """The inverse of `line`. Raises UsageError for any other command."""
        words = shlex.split(line)
        if words[: len(_PREFIX)] != _PREFIX:
            raise UsageError(f"the job's command is not a driver of ray-elastic: {line[:200]!r}")
        return cls.of_words(words[len(_PREFIX) :])

    @classmethod
    def of_words(cls, words: list[str] | None) -> DriverCommand:
        """From the words after the module's name (None: this process's own). Raises UsageError."""
        options = _parser().parse_args(words)
        if options.mode not in get_args(Mode):
            raise UsageError(f"--mode must be one of {', '.join(get_args(Mode))}, not {options.mode!r}")
        return cls(
            options.job, check_run_id(options.run_id), options.attempt, options.mode, options.storage,
            options.client_version, options.max_steps, options.code,
        )  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"the driver does not understand its command: {message}; is ray-elastic older on the cluster?")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="elastic_jobs.submit.driver",
        description="The driver of a run inside a Ray job, started by `elastic submit`.",
    )
    parser.add_argument("job", metavar="JOB.yaml")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--mode", default="continue")
    parser.add_argument("--storage", required=True)
    parser.add_argument("--client-version", required=True)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--code")
    return parser
