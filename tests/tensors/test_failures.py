"""What is a lost peer, and what is the user's own error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

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
        (DeviceError(700), "user_error", False),
        (RuntimeError("CUDA error"), "user_error", True),
    ],
)
def test_broken_hardware_is_not_the_users_and_its_process_not_used_again(
    error: Exception, kind: str, clean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "backend_and_device", lambda local_rank: ("gloo", torch.device("cpu")))
    runner = loop.GenerationRunner(GenerationSpec("run", 3, 0, 1), SilentCoordinator(), Rendezvous("127.0.0.1", 1))
    result = runner._classify(error)
    runner._leave(result)
    assert (result.kind, runner.clean) == (kind, clean)
    event = codec.outcome(result, 3, 7)
    if kind == "device_failed":
        assert event == ev.CollectiveFailed(3, 7, 0, "its device failed: CUDA error 214")
    else:
        assert isinstance(event, ev.UserCodeFailed)
