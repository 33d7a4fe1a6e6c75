"""A GPU that Ray reserves and torch does not use is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.core.errors import UsageError
from elastic.core.policy.device_health import DeviceHealth
from elastic.core.settings import RunSettings
from elastic.runtime.worker import device as device_module
from elastic.runtime.worker.device import Seen, bind_to_device, check_device, check_health, choose
from elastic.runtime.worker.numa import Sysfs

GOOD = Seen(torch="2.13.0+cu130", built_for="cuda", devices=1, used="cuda")


def check(seen: Seen, given: tuple[int, ...] = (3,), accelerator: str | None = None) -> None:
    environment = {} if accelerator is None else {"DS_ACCELERATOR": accelerator}
    check_device(given, seen, environment, "ab12 (10.0.0.7)")


def test_a_device_that_all_three_agree_on_is_taken() -> None:
    check(GOOD)
    check(Seen("2.13.0+cpu", None, 0, "cpu"), given=())
    # The user has asked for the CPU: logical GPUs, as in tests.
    check(Seen("2.13.0+cpu", None, 0, "cpu"), accelerator="cpu")


def test_a_cpu_build_of_torch_on_a_gpu_is_refused_naming_both() -> None:
    with pytest.raises(UsageError, match=r"Ray reserves GPU 3 of node ab12 \(10\.0\.0\.7\).* torch 2\.13\.0\+cpu is a"):
        check(Seen("2.13.0+cpu", None, 0, "cpu"))


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (replace(GOOD, devices=0, used="cpu"), "finds no cuda device there: look at the driver"),
        (replace(GOOD, used="cpu"), "DeepSpeed would train on the CPU"),
    ],
)
def test_what_is_wrong_on_one_node_only_is_an_error_of_that_node(seen: Seen, words: str) -> None:
    """Another node may do it: no UsageError, which would end the run."""
    with pytest.raises(RuntimeError, match=words):
        check(seen)


def test_two_workers_that_would_share_the_first_device_are_refused() -> None:
    with pytest.raises(UsageError, match="torch sees 8 devices"):
        check(replace(GOOD, devices=8))


@pytest.mark.parametrize(("gpus", "why"), [(0.5, "share one device"), (2, "would be idle")])
def test_a_worker_has_one_whole_gpu_or_none(gpus: float, why: str) -> None:
    for good in (0, 1, 1.0):
        RunSettings("run", resources_per_worker={"CPU": 1, "GPU": good})
    with pytest.raises(UsageError, match=rf"resources_per_worker\.GPU is {gpus:g}, but must be 0 or 1.*{why}"):
        RunSettings("run", resources_per_worker={"GPU": gpus})


@pytest.mark.parametrize(
    ("given", "before", "after"),
    [
        ((), {}, {"DS_ACCELERATOR": "cpu"}),
        ((), {"DS_ACCELERATOR": "cuda"}, {"DS_ACCELERATOR": "cuda"}),
        ((3,), {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        # A logical GPU, as in tests.
        ((3,), {"DS_ACCELERATOR": "cpu"}, {"DS_ACCELERATOR": "cpu"}),
    ],
)
def test_the_process_is_set_up_before_it_touches_a_device(
    given: tuple[int, ...], before: dict[str, str], after: dict[str, str]
) -> None:
    choose(given, before)
    assert before == after


def test_binding_needs_a_device_to_be_near_to() -> None:
    RunSettings("run", resources_per_worker={"GPU": 1}, numa_binding="node")
    with pytest.raises(UsageError, match="numa_binding is node, which needs a GPU"):
        RunSettings("run", numa_binding="node")


def test_a_worker_is_bound_near_its_device_however_its_address_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bound: list[tuple[str, str]] = []
    monkeypatch.setattr(device_module, "bind_near", lambda *asked: bound.append(asked[:2]))
    monkeypatch.setattr(device_module, "NvmlDevice", Device)
    place = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xAF, pci_device_id=2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: {0: place}[number])
    for given in ((3,), (9,)):
        bind_to_device(given, "exclusive", {}, "ab12")
    assert bound == [("0000:3b:00.0", "exclusive"), ("0001:af:02.0", "exclusive")]
    bind_to_device((3,), "off", {}, "ab12")
    bind_to_device((3,), "node", {"DS_ACCELERATOR": "cpu"}, "ab12")
    assert len(bound) == 2


def test_a_binding_that_cannot_be_kept_names_device_and_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_module, "NvmlDevice", Device)
    with pytest.raises(RuntimeError, match=r"numa_binding: node cannot be kept for GPU 3 of node ab12: none of the"):
        bind_to_device((3,), "node", {}, "ab12", Sysfs(tmp_path))


class Device:
    """What NVML tells of GPU 3 and of GPU 4; it does not know others."""

    KNOWN: Mapping[str, DeviceHealth] = {
        "3": DeviceHealth("H100", remap_pending=True),
        "4": DeviceHealth("H100", uncorrected_errors=2),
    }

    def __init__(self, identity: str) -> None:
        self._health = self.KNOWN[identity]

    @classmethod
    def find(cls, identity: str) -> Device | None:
        return cls(identity) if identity in cls.KNOWN else None

    def health(self) -> DeviceHealth:
        return self._health

    def bus_id(self) -> str:
        return "00000000:3B:00.0"


def test_a_device_that_will_not_last_is_an_error_of_its_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_module, "NvmlDevice", Device)
    where = "ab12 (10.0.0.7)"
    with pytest.raises(RuntimeError, match=r"GPU 3 of node ab12 \(10\.0\.0\.7\), which .* is unfit: .*reset the GPU"):
        check_health((3,), {}, where)
    check_health((3,), {"DS_ACCELERATOR": "cpu"}, where)
    check_health(("9",), {}, where)
    assert caplog.messages == []
    check_health((4,), {}, where)
    assert caplog.messages == [
        "GPU 4 of node ab12 (10.0.0.7): 2 uncorrectable memory errors since its driver was loaded"
    ]
