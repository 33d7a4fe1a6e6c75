"""From an address to fsspec: checked for credentials, with options that disable stale caches and nested retries."""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from elastic.core.errors import StorageError, UsageError
from elastic.core.secrets import check_url, redact

_EXTRAS = {"s3": "ray-elastic[s3]", "s3a": "ray-elastic[s3]"}
# Only our own layer retries (`store.remote`): three nested layers would turn seconds into minutes.
_S3_CONFIG = {
    "connect_timeout": 5.0,
    "read_timeout": 30.0,
    "max_pool_connections": 32,
    "retries": {"mode": "standard", "total_max_attempts": 1},
}


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system and the path in it. Raises UsageError for an address that cannot work or holds secrets."""
    check_url(url)
    try:
        fs, root = fsspec.url_to_fs(url, **_options(url))
    except ImportError as error:
        extra = _EXTRAS.get(_scheme(url))
        hint = f"install {extra}" if extra else str(error)
        raise UsageError(f"cannot use {url!r} as storage: its driver is not installed; {hint}") from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"cannot use {url!r} as storage: {redact(str(error))}") from error
    except Exception as error:
        raise StorageError(f"cannot open storage {url!r}: {redact(str(error))}") from error
    if is_s3(fs):
        fs.retries = 1
    return fs, str(root)


def local_root(url: str) -> str | None:
    """The folder of this machine that an address names; None for remote storage. Raises as `file_system` does."""
    fs, root = file_system(url)
    return root if isinstance(fs, LocalFileSystem) else None


def is_s3(fs: Any) -> bool:
    """Does not import the driver, which takes a second."""
    return any(base.__name__ == "S3FileSystem" for base in type(fs).__mro__)


def _options(url: str) -> dict[str, Any]:
    if _scheme(url) not in ("s3", "s3a"):
        return {}
    given = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    # Other processes write here too: a cached listing would hide their objects.
    return {"use_listings_cache": False, "config_kwargs": {**_S3_CONFIG, **given}}


def _scheme(url: str) -> str:
    return url.partition("://")[0] if "://" in url else ""
