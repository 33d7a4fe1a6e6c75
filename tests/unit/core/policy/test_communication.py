"""What a job may ask for of the way that gradients travel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core.policy.communication import (
    EXACT,
    LOCAL,
    LOSSY,
    permitted,
    refused_beside,
    refused_communication,
    refused_hook,
    refused_in_rounds,
)
from elastic.core.settings import CommunicationSettings


@pytest.mark.parametrize("name", EXACT)
def test_what_is_named_is_what_is_used(name: str) -> None:
    settings = CommunicationSettings(strategy=name)
    assert refused_communication(settings) is None
    assert permitted(settings) == (name,)


def test_auto_chooses_within_what_is_granted() -> None:
    assert permitted(CommunicationSettings()) == EXACT
    assert permitted(CommunicationSettings("error_feedback")) == ("hierarchical", *LOSSY)


@pytest.mark.parametrize("name", LOSSY)
def test_what_loses_anything_must_be_granted(name: str) -> None:
    refused = refused_communication(CommunicationSettings(strategy=name))
    assert refused is not None
    assert "must be granted: add semantics: error_feedback" in refused
    assert refused_communication(CommunicationSettings("error_feedback", name)) is None


@pytest.mark.parametrize(
    ("settings", "engine", "tp", "said"),
    [
        (CommunicationSettings(strategy="bounded_staleness"), "deepspeed", 1, "must be granted: add semantics: async"),
        (CommunicationSettings("async", "ring"), "deepspeed", 1, "with semantics: async must be auto, bounded_stal"),
        (CommunicationSettings("async", staleness=-1), "deepspeed", 1, "staleness (-1) must be at least 0 and below"),
        (CommunicationSettings("async", staleness=4, every_steps=4), "deepspeed", 1, "below every_steps (4)"),
        (CommunicationSettings("local", "diloco", staleness=2), "deepspeed", 1, "belongs to semantics: async"),
        (CommunicationSettings("async", islands=2), "deepspeed", 1, "islands belongs to semantics: local"),
        (CommunicationSettings("loose"), "deepspeed", 1, "communication.semantics is 'loose', but must be exact"),
        (
            CommunicationSettings(strategy="star"),
            "deepspeed",
            1,
            "must be auto, all_reduce, ring, tree or hierarchical",
        ),
        (CommunicationSettings(), "fsdp2", 1, "not fsdp2, which reduces within the backward pass"),
        (CommunicationSettings(), "deepspeed", 2, "with mesh: {tp: 2}"),
        (CommunicationSettings(strategy="diloco"), "deepspeed", 1, "must be granted: add semantics: local"),
        (CommunicationSettings("local"), "deepspeed", 1, "name the strategy, local_sgd, diloco or streaming_diloco"),
        (CommunicationSettings("local", "ring"), "deepspeed", 1, "with semantics: local must be auto, local_sgd"),
        (CommunicationSettings(every_steps=5), "deepspeed", 1, "every_steps belongs to semantics: local or async"),
        (
            CommunicationSettings("local", "local_sgd", outer_lr=0.5),
            "deepspeed",
            1,
            "outer_lr belongs to strategy: dil",
        ),
        (
            CommunicationSettings("local", "diloco", overlap_steps=1),
            "deepspeed",
            1,
            "overlap_steps belongs to strategy",
        ),
        (
            CommunicationSettings("local", "streaming_diloco", every_steps=10),
            "deepspeed",
            1,
            "every_steps (10) must be a multiple of fragments (3)",
        ),
        (
            CommunicationSettings("local", "streaming_diloco", every_steps=6, overlap_steps=2),
            "deepspeed",
            1,
            "overlap_steps (2) must be below every_steps / fragments (2)",
        ),
        (CommunicationSettings("local", "diloco"), "fsdp2", 1, "not fsdp2, which reduces within the backward pass"),
        (CommunicationSettings(bucket_mb=-1), "deepspeed", 1, "bucket_mb must be above zero, got -1"),
    ],
)
def test_what_cannot_be_honoured_is_refused(settings: CommunicationSettings, engine: str, tp: int, said: str) -> None:
    refused = refused_communication(settings, engine, tp)
    assert refused is not None
    assert said in refused


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("allreduce_hook", "strategy: all_reduce"),
        ("fp16_compress_hook", "communication_data_type: fp16"),
        ("BF16_COMPRESS", "communication_data_type: bf16"),
        ("bf16_compress_wrapper_hook", "communication_data_type: bf16"),
        ("powerSGD_hook", "{semantics: error_feedback, strategy: power_sgd, rank: N}"),
        ("POWER_SGD_RANK2", "{semantics: error_feedback, strategy: power_sgd, rank: N}"),
        ("batched_powerSGD_hook", "strategy: power_sgd"),
        ("quantization_pertensor_hook", "{semantics: error_feedback, strategy: int8}"),
        ("QUANTIZE_PER_CHANNEL", "strategy: int8"),
        ("post_localSGD_hook", "{semantics: local, strategy: local_sgd, every_steps: N}"),
        ("hook_with_zero_fn", "ZeRO stage 1"),
        ("noop_hook", "leave it out"),
    ],
)
def test_a_hook_of_torch_is_answered_with_what_does_the_same(name: str, instead: str) -> None:
    for granted in ("exact", "error_feedback", "local"):
        refused = refused_communication(CommunicationSettings(granted, name))
        assert refused is not None
        assert refused.startswith(f"communication.strategy: {name} is a communication hook of torch's Distributed")
        assert instead in refused
    assert refused_hook("star") is None


@pytest.mark.parametrize("name", LOCAL)
def test_islands_must_be_granted_and_named(name: str) -> None:
    settings = CommunicationSettings("local", name)
    assert refused_communication(settings) is None
    assert permitted(settings) == (name,)
    assert refused_in_rounds(settings, 1, audited=False, measured=False) is None
    assert "mesh: {sp: 2}" in (refused_in_rounds(settings, 2, audited=False, measured=False) or "")
    late = CommunicationSettings("async")
    assert refused_communication(late) is None
    assert permitted(late) == ("bounded_staleness",)
    assert "async does not go with gradient_noise" in (refused_in_rounds(late, 1, audited=False, measured=True) or "")
    assert refused_in_rounds(CommunicationSettings(), 2, audited=True, measured=True) is None


def test_a_parameter_server_must_be_named_and_granted() -> None:
    served = CommunicationSettings("async", "parameter_server", staleness=0, every_steps=5)
    assert refused_communication(served) is None
    assert permitted(served) == ("parameter_server",)
    assert "must be granted" in (refused_communication(replace(served, semantics="exact")) or "")
    assert "bucket_mb belongs to other strategies" in (refused_communication(replace(served, bucket_mb=1.0)) or "")
    assert "staleness (5)" in (refused_communication(replace(served, staleness=5)) or "")
    for policy, bad in (("rollback", False), ("stop", False), ("off", False), ("skip", True)):
        refused = refused_in_rounds(served, 1, audited=False, measured=False, anomalies=policy)
        assert bad == ("anomalies.policy: skip" in (refused or ""))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimization": {"stage": 2}}, "ZeRO stage 2"),
        ({"zero_optimization": {"stage": 3}}, "ZeRO stage 3"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, "overlap_comm"),
        ({"communication_data_type": "bf16"}, "communication_data_type"),
    ],
)
def test_a_configuration_under_which_gradients_travel_otherwise_is_refused(config: dict[str, Any], said: str) -> None:
    refused = refused_beside(config)
    assert refused is not None
    assert refused.startswith(f"communication is not supported with {said}")


@pytest.mark.parametrize("name", [*LOSSY, "local_sgd"])
def test_nothing_is_compressed_in_stage_3(name: str) -> None:
    granted = "local" if name == "local_sgd" else "error_feedback"
    assert refused_communication(CommunicationSettings(granted, name)) is None
    refused = refused_beside({"zero_optimization": {"stage": 3}}, granted)
    assert refused == (
        "communication is not supported with ZeRO stage 3, which reduces in every backward pass; leave one of them out"
    )


@pytest.mark.parametrize("zero", [{}, {"stage": 0}, {"stage": 1, "overlap_comm": False, "offload_optimizer": None}])
def test_stages_0_and_1_are_taken(zero: dict[str, Any]) -> None:
    assert refused_beside({"zero_optimization": zero, "fp16": {"enabled": False}}) is None
