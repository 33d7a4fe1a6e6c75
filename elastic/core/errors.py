"""Every error this project raises on purpose.

    ElasticError
    |-- for the user, who must change the job
    |   |-- UsageError            (exit 2)    bad job file, bad configuration, bad entry point
    |   |   |-- ModelMismatch     (exit 2)    a resume with another model
    |   |   |-- MeshRefused       (exit 2)    a model that so many workers cannot share
    |   |   |-- NobodyAnswers     (exit 2)    no cluster at the address, or none for now
    |   |   `-- TokenRefused      (exit 2)    a cluster at the address that wants another token
    |   `-- UserCodeError         (exit 100)  the training function raised
    |-- for the operator, who must look at the cluster or the storage
    |   |-- NoCapacity            (exit 105)  fewer than min_workers could be had
    |   |-- GaveUp                (exit 104)  crash loop, or no progress
    |   |-- IntegrityError        (exit 106)  no checkpoint passed its verification
    |   |-- StorageError          (exit 101)  storage could not be reached; retried first
    |   `-- RunNotFound           (exit 102)
    `-- for nobody: handled inside, seen in logs
        |-- CollectiveFailed                  a peer was lost; the generation ends
        |-- RunOver                           the training function loops on after the run's end (not an Exception)
        |-- GenerationEnded                   the controller ended this generation (not an Exception: see there)
        `-- Fenced                            a message or write of an old generation

Errors carry where they happened and survive pickling, since Ray sends them between processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Where:
    """The place an error belongs to; unknown parts are None and are left out when printed."""

    rank: int | None = None
    node: str | None = None
    step: int | None = None
    generation: int | None = None

    def __str__(self) -> str:
        parts = [f"{name} {value}" for name, value in vars(self).items() if value is not None]
        return ", ".join(parts)


class ElasticError(Exception):
    """Base of all. `message` is one sentence that says what happened and what to do."""

    exit_code = 101

    def __init__(self, message: str, where: Where | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where or Where()

    def __str__(self) -> str:
        place = str(self.where)
        return f"{self.message} ({place})" if place else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.where)


class UsageError(ElasticError):
    exit_code = 2


class MeshRefused(UsageError):
    """The model cannot be cut for this mesh; another one may do, where the job says `tp: any`."""


class ModelMismatch(UsageError):
    pass


class NobodyAnswers(UsageError):
    pass


class TokenRefused(UsageError):
    pass


class UserCodeError(ElasticError):
    exit_code = 100


class NoCapacity(ElasticError):
    exit_code = 105


class GaveUp(ElasticError):
    exit_code = 104


class IntegrityError(ElasticError):
    exit_code = 106


class StorageError(ElasticError):
    exit_code = 101


class RunNotFound(ElasticError):
    exit_code = 102


class CollectiveFailed(ElasticError):
    pass


class Fenced(ElasticError):
    pass


class RunOver(BaseException):
    """Unwinds a training function that asks for batches for ever after the run's last step."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the run is over after step {step}")
        self.step = step

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step,)


class GenerationEnded(BaseException):
    """Unwinds the user's training function when the controller ends a generation.

    Derived from BaseException so that a user's `except Exception` around a step cannot swallow it.
    """

    def __init__(self, generation: int, reason: str) -> None:
        super().__init__(f"generation {generation} ended: {reason}")
        self.generation = generation
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.generation, self.reason)
