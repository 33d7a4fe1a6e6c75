"""What is a lost peer, and what is the user's own error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_process_groups import NoEngine

from elastic.comm.device_check import device_error
from elastic.comm.failures import as_collective_failure, peer_of
from elastic.core import events as ev
from elastic.core.errors import CollectiveFailed, Where
from elastic.core.generation_spec import GenerationSpec, Rendezvous
from elastic.runtime.worker import codec
from elastic.training import loop
from elastic.training.local import SilentCoordinator

_GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:31667: "
    "Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the application."
)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(_GLOO),
        RuntimeError("[../gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.3]:5"),
        RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 2000ms for recv operation"),
        dist.DistNetworkError("Broken pipe"),
        dist.DistStoreError("Socket Timeout"),
        dist.DistBackendError("NCCL error"),
    ],
)
def test_a_lost_peer_is_recognised(error: Exception) -> None:
    failure = as_collective_failure(error, Where(rank=1, step=3))
    assert isinstance(failure, CollectiveFailed)
    assert failure.__cause__ is error
    assert failure.where == Where(rank=1, step=3)
    assert as_collective_failure(failure) is failure


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ConnectionResetError(104, "Connection reset by peer"),
        NotImplementedError("gloo/transport"),
        ValueError("Connection closed by peer"),
        KeyboardInterrupt(),
    ],
)
def test_the_users_own_errors_are_left_alone(error: BaseException) -> None:
    assert as_collective_failure(error) is None


@pytest.mark.parametrize(
    ("message", "peer"),
    [
        (_GLOO, "127.0.0.1:31667"),
        ("x [fe80::1]:80: Connection closed by peer", "fe80::1:80"),
        ("[../pair.cc:544] Timed out waiting 2000ms for recv operation to complete", None),
        ("Broken pipe", None),
    ],
)
def test_the_peer_is_read_from_gloos_message(message: str, peer: str | None) -> None:
    assert peer_of(message) == peer


class DeviceError(torch.AcceleratorError):
    def __init__(self, code: int) -> None:
        super().__init__(f"CUDA error {code}\nCUDA kernel errors might be reported later")
        self.error_code = code


@pytest.mark.parametrize(
    ("error", "kind", "clean"),
    [
        # An uncorrectable ECC error; an illegal address, which the user's own kernel may have used; and neither.
        (DeviceError(214), "device_failed", False),
        # The driver has lost the device, or cannot initialise it.
        (DeviceError(100), "device_failed", False),
        (DeviceError(3), "device_failed", False),
        (DeviceError(700), "user_error", False),
        (RuntimeError("CUDA error"), "user_error", True),
    ],
)
def test_broken_hardware_is_not_the_users_and_its_process_not_used_again(
    error: Exception, kind: str, clean: bool
) -> None:
    spec, where = GenerationSpec("run", 3, 0, 1), Rendezvous("127.0.0.1", 1)
    runner = loop.GenerationRunner(spec, SilentCoordinator(), where, kind=NoEngine("gloo"))
    result = runner.classify(error)
    runner.leave(result)
    assert (result.kind, runner.clean) == (kind, clean)
    event = codec.outcome(result, 3, 7)
    if kind == "device_failed":
        assert event == ev.CollectiveFailed(3, 7, 0, f"its device failed: CUDA error {error.error_code}")
    else:
        assert isinstance(event, ev.UserCodeFailed)


@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyError("labels"), True), (RuntimeError("Connection closed by peer [127.0.0.1]:4242"), False)],
)
def test_what_a_script_raises_once_its_generation_has_ended_is_said(
    error: Exception, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It may follow from the end, and is no failure of the run; a defect of the script's must not hide in it."""
    spec, where = GenerationSpec("run", 3, 0, 1), Rendezvous("127.0.0.1", 1)
    runner = loop.GenerationRunner(spec, SilentCoordinator(), where, kind=NoEngine("gloo"))
    runner.generation.scope.end("a node was lost")
    assert runner.classify(error).kind == "ended"
    runner.leave(runner.classify(error))
    assert ("KeyError was raised: 'labels'; if that is the script's own" in caplog.text) is said
    assert ("had ended" in caplog.text) is said


@pytest.mark.parametrize(
    ("device", "kind", "clean"),
    [
        (None, "collective_failed", True),
        (DeviceError(220), "device_failed", False),
        # A device assert, which the watchdog of NCCL noticed before the training thread did.
        (DeviceError(710), "user_error", False),
    ],
)
@pytest.mark.parametrize("noticed", ["raised", "polled"])
def test_a_collective_that_failed_for_the_device_is_not_told_as_a_lost_peer(
    device: DeviceError | None, kind: str, clean: bool, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "device_error", lambda device_of_rank: device)
    spec, where = GenerationSpec("run", 3, 0, 2), Rendezvous("127.0.0.1", 1)
    runner = loop.GenerationRunner(spec, SilentCoordinator(), where, kind=NoEngine("gloo"))
    error = dist.DistBackendError("NCCL error: unhandled cuda error")
    if noticed == "raised":
        result = runner.classify(error)
    else:
        result = runner._collective_failed(CollectiveFailed("a collective failed: nccl reports COMM_ERROR"))
        # What the training thread raises later does not make the device healthy.
        runner.classify(error)
    runner.leave(result)
    assert (result.kind, runner.clean) == (kind, clean)
    if device is not None:
        assert result.message == str(device)


def test_a_device_that_failed_while_its_generation_was_aborted_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "device_error", lambda device: DeviceError(214))
    spec, where = GenerationSpec("run", 3, 0, 2), Rendezvous("127.0.0.1", 1)
    runner = loop.GenerationRunner(spec, SilentCoordinator(), where, kind=NoEngine("gloo"))
    runner.abort("a peer was lost")
    result = runner.run(lambda: None)
    assert (result.kind, runner.clean) == ("ended", False)


def test_groups_that_cannot_be_asked_do_not_end_the_watch_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, where = GenerationSpec("run", 3, 0, 2), Rendezvous("127.0.0.1", 1)
    told: list[Any] = []
    runner = loop.GenerationRunner(spec, SilentCoordinator(), where, told.append, kind=NoEngine("gloo"))
    answers = iter([AttributeError("torn down"), None, "nccl reports COMM_ERROR"])

    def error() -> str | None:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(loop, "_ASK_EVERY_S", 0.0)
    monkeypatch.setattr(runner._group, "error", error)
    runner._watch_group()
    assert [result.kind for result in told] == ["collective_failed"]


def test_the_cpu_is_not_asked() -> None:
    assert device_error(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_device_that_works_has_no_error() -> None:
    assert device_error(torch.device("cuda")) is None
