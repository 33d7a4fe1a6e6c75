"""Environment variables of a job that Ray is not told: Ray writes a job's own ones into command lines and logs.

They lie in the cluster's control store, below a name that nobody can guess, and each process of the run takes them from
there before it imports any code of the user's. Ray's environment of the job holds that name only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from elastic.core.errors import NobodyAnswers, UsageError

# Holds the name.
VARIABLE = "ELASTIC_HANDED_ENVIRONMENT"
_LIMIT_S = 30.0


def packed(variables: Mapping[str, str]) -> bytes:
    """What the control store keeps."""
    return json.dumps(dict(variables)).encode()


def take(address: str | None = None) -> None:
    """Set this process's variables, if there are any. For arguments and errors see `fetch`."""
    os.environ.update(fetch(address))


def fetch(address: str | None = None) -> dict[str, str]:
    """The variables, if there are any. `address` is needed before the process has joined the cluster.

    Raises NobodyAnswers, and UsageError where the control store has lost them.
    """
    if not (name := os.environ.get(VARIABLE)):
        return {}
    # Here, since a driver's module is imported without Ray. Not by Ray's own functions for it: a driver takes its
    # variables before it connects.
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        store = GcsClient(address=address or ray.get_runtime_context().gcs_address)
        found = store.internal_kv_get(name.encode(), None, timeout=_LIMIT_S)
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise NobodyAnswers(f"the cluster's control store does not give the job's environment: {error}") from error
    if found is None:
        raise UsageError(
            "the cluster no longer has the environment of this job: send it again with `elastic resume --job`"
        )
    variables: dict[str, str] = json.loads(found)
    return variables
