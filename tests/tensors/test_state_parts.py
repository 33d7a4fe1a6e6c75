"""Parts of the engine's state that need no engine: host memory, JSON values, optimizer state, scalers, models."""

from __future__ import annotations

import gc
import json
import math
import threading
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.core.checkpoint.manifest import Manifest
from elastic.core.errors import ModelMismatch, UsageError
from elastic.core.sharding.layout import Chunk, RankLayout
from elastic.engines.inventory import Inventory, gaps
from elastic.engines.json_values import decode, encode
from elastic.engines.live_state import BUFFER, PARAM, Extra, Master, TensorSpec
from elastic.engines.optimizer import state as optimizer_state
from elastic.engines.optimizer.state import (
    MasterState,
    decode_scalars,
    encode_scalars,
    install_state,
    read_states,
    scalars_of,
)
from elastic.training.state.digest_reader import Reader
from elastic.training.state.engine_state import EngineState
from elastic.training.state.host import HostCopy, HostPool
from elastic.training.state.model_check import check_model


class TestHostPool:
    def test_copies_are_equal_flat_and_independent(self) -> None:
        weights = torch.arange(12, dtype=torch.float32).view(3, 4).t()
        flags = torch.tensor([True, False, True])
        found = HostPool(torch.device("cpu")).copy([HostCopy("a", weights), HostCopy("b", flags)])
        wanted = weights.reshape(-1).clone()
        weights.zero_()
        assert torch.equal(found["a"], wanted)
        assert found["b"].dtype is torch.bool
        assert found["b"].tolist() == [True, False, True]

    def test_padding_is_zero_whatever_was_in_it(self) -> None:
        found = HostPool(torch.device("cpu")).copy([HostCopy("a", torch.full((5,), math.nan), gaps=[(0, 1), (3, 2)])])
        assert torch.isnan(found["a"]).tolist() == [False, True, True, False, False]

    def test_memory_is_used_again_only_after_the_last_view_is_gone(self) -> None:
        pool = HostPool(torch.device("cpu"))
        first = pool.copy([HostCopy("a", torch.ones(1000))])
        address, view = first["a"].data_ptr(), first["a"][10:20]
        del first
        gc.collect()
        second = pool.copy([HostCopy("a", torch.zeros(1000))])
        assert second["a"].data_ptr() != address
        assert view.tolist() == [1.0] * 10
        del view, second
        gc.collect()
        third = pool.copy([HostCopy("a", torch.full((1000,), 3.0))])
        fourth = pool.copy([HostCopy("a", torch.full((1000,), 4.0))])
        assert address in {third["a"].data_ptr(), fourth["a"].data_ptr()}

    def test_a_larger_snapshot_gets_larger_memory(self) -> None:
        pool = HostPool(torch.device("cpu"))
        pool.copy([HostCopy("a", torch.ones(4))])
        gc.collect()
        assert pool.copy([HostCopy("a", torch.full((4000,), 2.0))])["a"].sum() == 8000.0

    def test_pinned_memory_is_as_large_as_it_must_be_and_let_go_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        registered: dict[int, int] = {}
        driver = SimpleNamespace(
            cudaHostRegister=lambda address, nbytes, flags: int(registered.setdefault(address, nbytes) != nbytes),
            cudaHostUnregister=lambda address: registered.pop(address) and 0,
        )
        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
        monkeypatch.setattr("elastic.training.state.pins.done", lambda device: True)
        pool = HostPool(torch.device("cuda"))
        for _ in range(3):
            # A writer that is slow: more in use at once than an idle pool would keep.
            several = [pool.copy([HostCopy("a", torch.ones(1056))])["a"] for _ in range(4)]
            held = several.pop()
            del several
            gc.collect()
        assert list(registered.values()) == [1056 * 4] * 5, "one was still held while four were taken"
        pool.close()
        assert registered == {}
        assert held.sum() == 1056.0


class TestValues:
    @pytest.mark.parametrize(
        "value",
        [
            None,
            True,
            3,
            0.1,
            "text",
            [1, (2.0, "a")],
            {"a": {"b": (1, 2)}, "c": []},
            {1: 2, "x": 3},
            {"$float": "not one of ours"},
            Counter({3: 1, 5: 2}),
            math.inf,
            -math.inf,
        ],
    )
    def test_values_survive_strict_json(self, value: Any) -> None:
        text = json.dumps(encode(value, "it"), allow_nan=False)
        found = decode(json.loads(text))
        assert found == value
        assert type(found) is type(value)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.float64])
    def test_a_single_tensor_keeps_dtype_shape_and_bits(self, dtype: torch.dtype) -> None:
        for value in (torch.tensor(7.3).to(dtype), torch.tensor([7.3]).to(dtype)):
            found = decode(json.loads(json.dumps(encode(value, "it"))))
            assert found.dtype is dtype
            assert found.shape == value.shape
            assert torch.equal(found, value)

    def test_each_decoding_makes_new_tensors(self) -> None:
        stored = encode(torch.tensor(1.0), "it")
        assert decode(stored) is not decode(stored)

    def test_what_json_cannot_hold_is_named_with_its_path(self) -> None:
        with pytest.raises(UsageError, match=r"scheduler\.inner\[1\] is a function"):
            encode({"inner": [1, lambda: 0]}, "scheduler")


def _stage(optimizer: torch.optim.Optimizer) -> Any:
    return SimpleNamespace(base=optimizer)


def _master(name: str, tensor: torch.Tensor, names: tuple[str, ...] = ()) -> Master:
    chunk = Chunk(name, 0, tensor.numel(), name, 0)
    return Master(name, 0, tensor, (chunk,), names or (name,), replicated=True)


class TestOptimizerState:
    def test_a_parameter_without_dimensions_is_told_from_a_step_count(self) -> None:
        point, line = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([point, line])
        (point * line.sum()).backward()
        optimizer.step()
        for state in read_states(optimizer, [_master("point", point), _master("line", line)]):
            assert set(state.tensors) == {"exp_avg", "exp_avg_sq"}
            assert set(state.scalars) == {"step"}

    def test_looking_creates_nothing(self) -> None:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight])
        assert read_states(optimizer, [_master("w", weight)])[0].tensors == {}
        assert len(optimizer.state) == 0

    def test_state_of_another_shape_is_refused_by_name(self) -> None:
        weight = torch.nn.Parameter(torch.ones(3, 4))
        optimizer = torch.optim.Adafactor([weight])
        weight.sum().backward()
        optimizer.step()
        with pytest.raises(UsageError, match=r"Adafactor keeps '(row|col)_var'"):
            read_states(optimizer, [_master("w", weight)])

    def test_scalars_are_stored_once_and_found_by_name(self) -> None:
        first, second, third = (torch.nn.Parameter(torch.ones(n)) for n in (2, 3, 4))
        optimizer = torch.optim.AdamW([first, second, third])
        (first.sum() + second.sum()).backward()
        optimizer.step()
        masters = [_master("a", first), _master("b", second), _master("c", third)]
        stored = encode_scalars(masters, read_states(optimizer, masters))
        assert len(stored) == 1
        by_name = decode_scalars(json.loads(json.dumps(stored)))
        assert set(by_name) == {"a", "b"}
        assert scalars_of(masters[2], by_name) is None
        assert scalars_of(_master("flat", torch.ones(9), ("c", "a")), by_name) == by_name["a"]

    def test_parameters_with_different_scalars_are_not_compared_with_each_other(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compared = 0

        class Value(int):
            def __eq__(self, other: object) -> bool:
                nonlocal compared
                compared += 1
                return super().__eq__(other)

            __hash__ = int.__hash__

        monkeypatch.setattr(optimizer_state, "encode", lambda value, where: Value(value))
        masters = [_master(f"w{number}", torch.ones(1)) for number in range(200)]
        stored = encode_scalars(masters, [MasterState({}, {"step": number % 100}) for number in range(200)])
        assert compared <= 200
        assert [entry["names"] for entry in stored] == [[f"w{n}", f"w{n + 100}"] for n in range(100)]
        assert [entry["values"]["step"] for entry in stored] == list(range(100))

    def test_one_flat_cannot_have_two_step_counts(self) -> None:
        by_name = {"a": {"step": 3}, "b": {"step": 4}}
        with pytest.raises(ModelMismatch, match="'a' and 'b' have different optimizer scalars"):
            scalars_of(_master("flat", torch.ones(2), ("a", "b")), by_name)

    def test_state_that_was_absent_goes_away(self) -> None:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        weight.sum().backward()
        optimizer.step()
        install_state(optimizer, _master("w", weight), {}, None)
        assert len(optimizer.state) == 0

    def test_state_is_made_with_the_stored_dtype_and_the_masters_shape(self) -> None:
        weight = torch.nn.Parameter(torch.ones(3, 2))
        optimizer = torch.optim.AdamW([weight])
        tensors = {"exp_avg": torch.ones(6, dtype=torch.bfloat16), "exp_avg_sq": torch.ones(6)}
        step = encode(torch.tensor(4.0), "step")
        install_state(optimizer, _master("w", weight), tensors, {"step": step})
        state = optimizer.state[weight]
        assert state["exp_avg"].dtype is torch.bfloat16
        assert state["exp_avg_sq"].shape == (3, 2)
        assert state["step"].item() == 4.0


class TestModel:
    def _manifest(self, parameters: dict[str, tuple[int, ...]], digests: list[str]) -> Manifest:
        return Manifest("id", "run", 1, 1, 1, 2, parameters, (), dict.fromkeys(digests, 0))

    def test_the_first_difference_in_the_models_order_is_named(self) -> None:
        manifest = self._manifest({"b": (2,), "a": (3,)}, ["master/b", "master/a"])
        specs = [TensorSpec("b", "master", (3,)), TensorSpec("a", "master", (9,))]
        with pytest.raises(ModelMismatch, match=r"'b' has shape \(3,\) here, \(2,\) in the checkpoint"):
            check_model(manifest, specs, ())

    def test_a_parameter_that_was_frozen_is_not_the_same(self) -> None:
        manifest = self._manifest({"a": (3,)}, ["param/a"])
        with pytest.raises(ModelMismatch, match="'a' is trained here, frozen in the checkpoint"):
            check_model(manifest, [TensorSpec("a", "master", (3,))], ())

    def test_what_the_model_lacks_is_named_unless_it_was_a_cache(self) -> None:
        manifest = self._manifest({"a": (3,), "cache": (2,)}, ["master/a", "buffer/cache"])
        specs = [TensorSpec("a", "master", (3,))]
        with pytest.raises(ModelMismatch, match="it has 'cache', this model has not"):
            check_model(manifest, specs, ())
        assert check_model(manifest, specs, ("cache",)) == {"cache"}

    def test_tensors_without_elements_are_no_difference(self) -> None:
        manifest = self._manifest({"a": (0,)}, [])
        assert check_model(manifest, [TensorSpec("a", "param", (0,))], ()) == frozenset()


class TestScaler:
    def test_a_dynamic_scaler_goes_on_where_it_was(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from deepspeed.runtime.fp16 import loss_scaler

        from elastic.engines.deepspeed.extra_state import install_scaler, read_scaler

        # It asks for the rank before it logs.
        monkeypatch.setattr(loss_scaler, "dist", SimpleNamespace(get_rank=lambda: 1))

        def engine() -> Any:
            scaler = loss_scaler.DynamicLossScaler(
                init_scale=256.0, scale_window=2, min_scale=1.0, delayed_shift=2, consecutive_hysteresis=False
            )
            return SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))

        used, fresh = engine(), engine()
        for overflow in (True, False, True, False, False):
            used.optimizer.loss_scaler.update_scale(overflow)
        stored = json.loads(json.dumps(read_scaler(used)))
        assert stored["kind"] == "dynamic"
        install_scaler(fresh, stored)
        for overflow in (False, True, True, False, False, False):
            used.optimizer.loss_scaler.update_scale(overflow)
            fresh.optimizer.loss_scaler.update_scale(overflow)
            assert vars(used.optimizer.loss_scaler) == vars(fresh.optimizer.loss_scaler)


def test_what_the_users_code_may_change_is_copied_before_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen parameters that follow the weights, say: a copy made during the next forward pass would be torn."""
    flat, frozen, buffer = torch.ones(4), torch.ones(3), torch.ones(2)
    whole = [Extra(kind, tensor, Chunk(kind, 0, len(tensor), kind, 0), True)
             for kind, tensor in ((PARAM, frozen), (BUFFER, buffer))]  # fmt: skip
    master = Master("group0", 0, flat, (Chunk("w", 0, 4, "group0", 0),), ("w",), replicated=False)
    state: Any = EngineState.__new__(EngineState)
    state.sharded = SimpleNamespace(
        rank=0, world_size=1, require_readable=lambda: None, elsewhere=frozenset(), writers=None
    )
    state.lanes, state.shares = SimpleNamespace(stages=1), SimpleNamespace(apart=None)
    state._verification, state.zero_stage, state.kept, state._scans = None, 2, dict, True
    inventory = Inventory((master,), (MasterState({}, {}),), tuple(whole))
    monkeypatch.setattr(Inventory, "of", lambda _: inventory)
    _, _, wanted = state._wanted()
    assert {item.key: item.at_once for item in wanted} == {
        "master/group0": False, "param/param": True, "buffer/buffer": True,
    }  # fmt: skip


class Slow:
    """A tensor that can be read when the test says so."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def detach(self) -> Slow:
        return self

    def reshape(self, shape: int) -> torch.Tensor:
        self.asked.set()
        assert self.go.wait(20.0)
        return torch.zeros(0)


def test_a_verification_that_nobody_waits_for_keeps_no_tensors() -> None:
    tensors: dict[str, Any] = {f"master/group{number}": Slow() for number in range(3)}
    gone = [weakref.ref(tensor) for tensor in tensors.values()]
    first = tensors["master/group2"]
    reader = Reader((), tensors, torch.device("cpu"))
    assert first.asked.wait(20.0)
    stopping = threading.Thread(target=reader.stop)
    stopping.start()
    while reader._tensors:
        pass
    first.go.set()
    stopping.join(20.0)
    tensors.clear()
    del first
    gc.collect()
    assert [tensor() for tensor in gone] == [None] * 3


def test_gaps_are_what_no_piece_covers() -> None:
    layout = RankLayout((Chunk("a", 0, 2, "x", 1), Chunk("b", 0, 1, "x", 5)), {"x": 8, "y": 3, "z": 0})
    assert gaps(layout) == {"x": [(0, 1), (3, 2), (6, 2)], "y": [(0, 3)], "z": []}
