"""The operator's signatures on the files in a run's folder that name code and clusters: `job.json` and `live.json`.

Optional: with a key in the environment all files are signed when written, and only files signed with that key are
read. The key is never an argument of a command. HMAC (RFC 2104) with SHA-256 over the run's id, the file's name and its
content, so that a signed file is valid in its own place only. An older file of the same run, signed with the same key,
is valid.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.core.errors import UsageError

KEY = "ELASTIC_SIGNING_KEY"
KEY_FILE = "ELASTIC_SIGNING_KEY_FILE"
_FIELD = "signature"
# As long as half a SHA-256: a shorter one may be guessed.
_LEAST_BYTES = 16


def key_from_environment() -> bytes | None:
    """The operator's key, or None. Raises UsageError for a key that is too short, or that other users can read."""
    text, file = os.environ.get(KEY), os.environ.get(KEY_FILE)
    if text is not None and file is not None:
        raise UsageError(f"{KEY} and {KEY_FILE} are both set; keep one of them")
    if file is not None:
        return _long_enough(_content(Path(file)), f"the key in {file} ({KEY_FILE})")
    return None if text is None else _long_enough(text.encode(), f"the key in {KEY}")


def sign(key: bytes | None, run_id: str, name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """The content with its signature; unchanged if there is no key."""
    plain = {field: value for field, value in data.items() if field != _FIELD}
    return plain if key is None else {**plain, _FIELD: _mac(key, run_id, name, plain)}


def verified(key: bytes | None, run_id: str, name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """The content without its signature. Raises UsageError if there is a key and the signature does not match it."""
    plain = {field: value for field, value in data.items() if field != _FIELD}
    found = data.get(_FIELD)
    if key is None:
        return plain
    right = _mac(key, run_id, name, plain)
    if not isinstance(found, str) or not hmac.compare_digest(found.encode(), right.encode()):
        what = "has no signature" if found is None else "is not signed with the key"
        raise UsageError(
            f"{name} of run {run_id!r} {what} that {KEY_FILE if KEY_FILE in os.environ else KEY} gives: somebody else "
            "wrote or changed it; name the job with --job and the cluster with --address if the run is yours"
        )
    return plain


def _mac(key: bytes, run_id: str, name: str, plain: Mapping[str, Any]) -> str:
    # As a reader gets it: tuples are lists there.
    text = json.dumps([run_id, name, plain], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _content(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            found = file.read(1 << 16).strip()
    except OSError as error:
        raise UsageError(f"the signing key {path} ({KEY_FILE}) cannot be read: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"the signing key {path} ({KEY_FILE}) can be read by others; `chmod 600 {path}`")
    return found


def _long_enough(key: bytes, what: str) -> bytes:
    if len(key) < _LEAST_BYTES:
        raise UsageError(f"{what} has {len(key)} bytes; at least {_LEAST_BYTES} are needed: `openssl rand -hex 32`")
    return key
