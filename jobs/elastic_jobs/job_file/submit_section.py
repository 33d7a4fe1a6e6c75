"""The job file's `submit` section: what is sent with a job, and the resources of its driver."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from elastic.core.errors import UsageError
from elastic.core.secrets import is_secret_name, redact
from elastic.core.settings import FailureSettings

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# After a planned end and its last write: time to read the journal and report the end.
_LAST_WORDS_S = 30.0
_GRACE = "RAY_JOB_STOP_WAIT_TIME_S"
_SIGNAL = "RAY_JOB_STOP_SIGNAL"
# Read by the dynamic linker, the interpreter, the allocator or Ray while a process starts.
_AT_START = re.compile(r"(LD_|DYLD_|PYTHON|RAY_|MALLOC_|GLIBC_|JE_MALLOC|TCMALLOC).*|PATH")


class SubmitSpec(BaseModel):
    """Sizes in decimal megabytes. An environment variable without a value is taken from the submitter, and is not
    handed to Ray."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    working_dir: str | None = None
    exclude: list[str] = Field(default_factory=list)
    package_limit_mb: Annotated[int, Field(ge=1, le=1000)] = 100
    pip: list[str] = Field(default_factory=list)
    py_modules: list[str] = Field(default_factory=list)
    env_vars: dict[str, str | None] = Field(default_factory=dict, repr=False)
    cpus: Annotated[float, Field(ge=0)] = 0.0
    memory_mb: Annotated[int, Field(ge=1)] = 500
    resources: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    stop_grace_s: Annotated[float, Field(gt=0)] | None = None

    @field_validator("env_vars")
    @classmethod
    def _names(cls, value: dict[str, str | None]) -> dict[str, str | None]:
        for name, given in value.items():
            _check_name(name)
            if given is None:
                _check_time(name)
            elif is_secret_name(name):
                raise ValueError(
                    f"{name} looks like a secret: omit its value, and it is taken from the submitter's environment"
                )
        return value

    @field_validator("pip", "py_modules")
    @classmethod
    def _on_record(cls, value: list[str]) -> list[str]:
        for entry in value:
            if (shown := redact(entry)) != entry:
                raise ValueError(f"{shown!r} holds credentials, which would be recorded with the job: leave them out")
        return value

    @field_validator("py_modules")
    @classmethod
    def _urls(cls, value: list[str]) -> list[str]:
        for module in value:
            if "://" not in module:
                raise ValueError(f"py_modules takes URLs; put the folder {module!r} into working_dir instead")
        return value

    def grace_s(self, failures: FailureSettings) -> int:
        """How long Ray waits between SIGTERM and SIGKILL: by default as long as a planned end may take."""
        wanted = self.stop_grace_s or failures.drain_timeout_s + failures.storage_timeout_s + _LAST_WORDS_S
        return max(1, round(wanted))


@dataclass(frozen=True)
class Variables:
    """A job's environment: variables that were `given` with their values, which are on record, and those that were
    `taken` from the submitter's environment, which may be secrets."""

    given: Mapping[str, str]
    taken: Mapping[str, str] = field(repr=False)


def environment(
    spec: Mapping[str, str | None], options: Sequence[str], local: Mapping[str, str] = os.environ
) -> Variables:
    """The job's variables: those of the job file, then `--env NAME=VALUE` and `--env NAME`. Raises UsageError.

    A name without a value is taken from `local`, so that a secret need not be in a file or a command line.
    """
    wanted = dict(spec)
    for option in options:
        name, given, value = option.partition("=")
        try:
            _check_name(name)
            if not given:
                _check_time(name)
        except ValueError as error:
            raise UsageError(f"--env {name}: {error}") from error
        if given and is_secret_name(name):
            raise UsageError(f"{name} looks like a secret: give `--env {name}` alone, and its value is taken from here")
        wanted[name] = value if given else None
    missing = [name for name, value in wanted.items() if value is None and name not in local]
    if missing:
        raise UsageError(f"the environment variable {missing[0]!r} should be sent to the job, but is not set here")
    return Variables(
        {name: value for name, value in wanted.items() if value is not None},
        {name: local[name] for name, value in wanted.items() if value is None},
    )


def runtime_env(spec: SubmitSpec, env_vars: Mapping[str, str], grace_s: int) -> dict[str, Any]:
    """Ray's runtime_env of the job without its package; the run's workers inherit it."""
    made: dict[str, Any] = {"env_vars": {**env_vars, _GRACE: str(grace_s), _SIGNAL: "SIGTERM"}}
    if spec.pip:
        made["pip"] = list(spec.pip)
    if spec.py_modules:
        made["py_modules"] = list(spec.py_modules)
    return made


def _check_time(name: str) -> None:
    """A variable without a value is set by our own code, which begins when the process has started."""
    if _AT_START.fullmatch(name):
        raise ValueError(
            f"{name} is read while a process starts, and what is taken from the submitter's environment is set after "
            "that: give its value, or set it on the nodes"
        )


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of an environment variable")
    if name in (_GRACE, _SIGNAL):
        raise ValueError(f"{name} is set from submit.stop_grace_s")
