"""A second engine is a package and a line: everything that needs a kind asks for it by the name in the settings."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from elastic.core.actions import BeginGeneration
from elastic.core.errors import UsageError
from elastic.core.settings import RunSettings
from elastic.engines import select
from elastic.runtime.controller.hands.generation_specs import shared_spec
from elastic.runtime.worker.device import look

SECOND = SimpleNamespace(name="second", device=lambda local_rank: ("none", SimpleNamespace(type="abacus")))


@pytest.fixture(autouse=True)
def _a_second_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("elastic.engines.second.kind")
    module.KIND = SECOND  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elastic.engines.second", ModuleType("elastic.engines.second"))
    monkeypatch.setitem(sys.modules, "elastic.engines.second.kind", module)
    monkeypatch.setattr(select, "ENGINES", (*select.ENGINES, "second"))


def test_the_name_chooses_the_kind() -> None:
    assert select.engine_kind("second") is SECOND
    assert select.engine_kind("deepspeed").name == RunSettings("r").engine == "deepspeed"


def test_the_name_in_the_settings_reaches_every_rank_and_its_device() -> None:
    settings = RunSettings("r", engine="second")
    begin = BeginGeneration(1, (0, 1), None, 0)
    assert shared_spec(settings, begin).engine == "second"
    assert look("second").used == "abacus"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match=r"engine 'third' is unknown; the engines are: deepspeed, fsdp2, second"):
        select.engine_kind("third")
