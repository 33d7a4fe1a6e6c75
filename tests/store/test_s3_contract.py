"""S3 does what every kind of storage must do, checkpoints and journals included."""

from __future__ import annotations

import pytest
from journal_contract import *  # noqa: F403 - the tests of the contract, with this folder's fixtures
from storage_contract import *  # noqa: F403

from elastic.checkpoint.storage import CheckpointStore
from elastic.store.objects import Objects


@pytest.fixture
def store(objects: Objects) -> CheckpointStore:
    return CheckpointStore("the url", "run", objects=objects)
