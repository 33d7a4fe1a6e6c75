"""The one place where errors of fsspec, its drivers and the operating system are translated into ours."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Iterator
from typing import Any

from elastic.core.errors import ElasticError, IntegrityError, StorageError, UsageError
from elastic.core.secrets import redact

# A retry may succeed: drivers fetch fresh credentials by themselves.
_STALE = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestTimeTooSkewed"}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}


@contextlib.contextmanager
def translated(path: str, *, writing: bool = False) -> Iterator[None]:
    """Translate foreign errors. A missing folder: a fault of storage when writing, of the checkpoint when reading."""
    try:
        yield
    except ElasticError:
        raise
    except Exception as error:
        raise _ours(error, path, writing) from error


def service_code(error: BaseException | None) -> str | None:
    """The error code of an AWS-like service, for example "SlowDown"; drivers hide it in a cause."""
    while error is not None:
        response: Any = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code") or "") or None
        error = error.__cause__
    return None


def cut_off(path: str, wanted: int, found: int) -> IntegrityError:
    return IntegrityError(f"{path} ends at byte {found}, but byte {wanted} is needed: it is cut off")


def _ours(error: Exception, path: str, writing: bool) -> ElasticError:
    code, reason = service_code(error), _reason(error)
    if code == "NoSuchBucket":
        return UsageError(f"storage has no such bucket, needed for {path}; create it, or correct the address")
    if code == "PreconditionFailed":
        error = FileExistsError(reason)
    match error:
        case FileNotFoundError() if not writing:
            return IntegrityError(f"{path} is missing in storage")
        case FileExistsError():
            return IntegrityError(f"{path} exists already in storage and is never replaced")
        case PermissionError() if code in _STALE:
            return StorageError(f"storage failed at {path}: {reason}")
        case PermissionError() | NotADirectoryError() | IsADirectoryError():
            return UsageError(f"storage does not allow access to {path}: {reason}")
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageError(f"disk full: no space left to write {path}")
    if type(error).__name__ in _NO_CREDENTIALS:
        return UsageError(f"storage wants credentials for {path} and none are set; give them by the environment")
    return StorageError(f"storage failed at {path}: {reason}")


def _reason(error: Exception) -> str:
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)) and not str(error):
        return "it did not answer in time"
    code = service_code(error)
    # Errors of the drivers' own libraries mean little without their type.
    prefix = code if code else None if isinstance(error, OSError) else type(error).__name__
    # The errno that a driver derives from a service's answer carries no information.
    text = error.strerror if code and isinstance(error, OSError) and error.strerror else str(error)
    return redact(text if prefix is None or prefix in text else f"{prefix}: {text}")
