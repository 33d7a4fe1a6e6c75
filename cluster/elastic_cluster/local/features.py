"""Optional features of a local cluster, as settings for each of its processes.

- A control store that can be killed and started again: Ray's own, kept in RocksDB below the cluster's directory.
- A token that everybody who connects must show. It is in a file of mode 0600 and nowhere else: not in an argument,
  an environment or a log, all of which others can read or keep.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path

DURABLE = "durable-control-store"
TOKEN = "token"

# Ray ends every process that misses the control store for this long; its default of 60 s is too short for a head.
_RECONNECT_LIMIT_S = 600


def token_file(directory: Path) -> Path:
    return directory / "token"


def settings(features: Collection[str], directory: Path) -> Mapping[str, str]:
    """The environment of the cluster's processes; makes what it points to. ValueError for a feature that is none."""
    unknown = set(features) - {DURABLE, TOKEN}
    if unknown:
        raise ValueError(f"there is no feature {', '.join(sorted(unknown))}")
    made: dict[str, str] = {}
    if DURABLE in features:
        store = directory / "control-store"
        store.mkdir(mode=0o700)
        made["RAY_gcs_storage"], made["RAY_gcs_storage_path"] = "rocksdb", str(store)
        made["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(_RECONNECT_LIMIT_S)
    if TOKEN in features:
        file = token_file(directory)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(secrets.token_hex(32))
        made["RAY_AUTH_MODE"], made["RAY_AUTH_TOKEN_PATH"] = "token", str(file)
    return made
