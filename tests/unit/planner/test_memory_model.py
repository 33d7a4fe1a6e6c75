"""Memory by part: the figures of Korthikanti et al., and how each choice changes the part that it should."""

from __future__ import annotations

import dataclasses

import pytest

from elastic.core.errors import UsageError
from elastic.planner.activations import layer_activations
from elastic.planner.memory_model import BufferSizes, MemoryModel
from elastic.planner.model_shape import MODELS, ModelShape, parse_model
from elastic.planner.states import MEGATRON_ADAM
from elastic.planner.strategy import Mesh, Strategy

GIB = 2**30

# arXiv 2205.05198, Figures 1 and 7, as digits in Calculon's calculon/llm/validation.py (Apache-2.0): hidden, layers,
# heads, micro-batch, pp, virtual stages; GiB of states, of activations without any measure, with sequence parallelism
# and selective recomputation; share of the former that is left with full recomputation.
KORTHIKANTI = {
    "22B": ((6144, 48, 64, 4, 1, 1), 45.5625, 59.25, 9.5625, 0.0764),
    "175B": ((12288, 96, 96, 1, 8, 3), 45.5625, 66.84375, 12.3515625, 0.0871),
    "530B": ((20480, 105, 128, 1, 35, 3), 31.640625, 114.0234, 23.0762, 0.0942),
    "1T": ((25600, 128, 160, 1, 64, 1), 32.9590, 131.25, 26.5625, 0.0942),
}
PLAIN = MemoryModel(dtypes=MEGATRON_ADAM, buffers=BufferSizes(reduce_bucket=0), reserve_bytes=0)


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_states_and_activations_of_korthikanti(name: str) -> None:
    (hidden, layers, heads, micro, pp, virtual), states, none, measured, share = KORTHIKANTI[name]
    # The paper counts 12 L h^2 parameters.
    model = ModelShape(layers, hidden, heads, vocabulary=0, sequence=2048, biases=False)
    mesh = Mesh(tp=8, pp=pp)
    plain = Strategy(global_batch=64 * micro, micro_batch=micro, virtual_stages=virtual)
    found = PLAIN.peak(model, plain, mesh)
    assert (found.weights + found.gradients + found.optimizer) / GIB == pytest.approx(states, rel=1e-3)
    assert found.activations / GIB == pytest.approx(none, rel=1e-3)
    both = dataclasses.replace(plain, sequence_parallel=True, recompute="selective")
    assert PLAIN.peak(model, both, mesh).activations / GIB == pytest.approx(measured, rel=1e-3)
    full = PLAIN.peak(model, dataclasses.replace(plain, recompute="full"), mesh)
    # The paper's shares count the dropout after the embedding as well; the digits above do not.
    assert full.activations / found.activations == pytest.approx(share, abs=0.0015)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt2", 124.44), ("gpt2-xl", 1557.6), ("llama-2-7b", 6738.4), ("llama-3-8b", 8030.3), ("llama-3-70b", 70553.7),
     ("llama-3-405b", 405853.4)],
)  # fmt: skip
def test_parameters_of_published_models(name: str, millions: float) -> None:
    assert MODELS[name].parameters / 1e6 == pytest.approx(millions, rel=1e-4)


def test_the_ranks_of_all_stages_hold_the_whole_model() -> None:
    model = MODELS["llama-3-8b"]
    held = [sum(t.numel * t.count for t in model.stage_tensors(pp=4, stage=stage)) for stage in range(4)]
    assert sum(held) == model.parameters
    assert held[1] == held[2] < held[3]


def test_the_last_stage_is_the_fullest_where_logits_outweigh_micro_batches_in_flight() -> None:
    model = dataclasses.replace(MODELS["llama-3-8b"], sequence=2048)
    full = Strategy(global_batch=64, micro_batch=8, recompute="full")
    assert MemoryModel().peak(model, full, Mesh(pp=2)).pipeline_stage == 1
    assert MemoryModel().peak(model, dataclasses.replace(full, recompute="none"), Mesh(pp=2)).pipeline_stage == 0


def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones() -> None:
    model = ModelShape(2, 64, 4, 0, 16, experts=8, experts_per_token=2, biases=False)
    dense = sum(t.numel * t.count for t in model.stage_tensors() if not t.expert)
    experts = model.parameters - dense
    found = MemoryModel().peak(model, Strategy(zero_stage=1), Mesh(dp=8, ep=4))
    assert found.weights == 2 * (dense + experts // 4)
    assert found.optimizer == 12 * (dense // 8 + experts // 4 // 2)


def test_offload_moves_the_states_to_the_host_and_nothing_is_lost() -> None:
    model, mesh = MODELS["gpt2-xl"], Mesh(dp=8)
    kept = MemoryModel().peak(model, Strategy(zero_stage=3), mesh)
    moved = MemoryModel().peak(model, Strategy(zero_stage=3, offload="parameters"), mesh)
    assert (moved.weights, moved.optimizer, kept.offload) == (0, 0, 0)
    # The host also holds an fp32 copy of the gradients.
    assert moved.offload == kept.weights + kept.optimizer + kept.optimizer // 3
    assert moved.total < kept.total


def test_a_fused_attention_and_sequence_ranks_leave_less_to_keep() -> None:
    model, strategy = MODELS["gpt3-6.7b"], Strategy(micro_batch=2)
    plain = layer_activations(model, strategy, Mesh()).all
    fused = layer_activations(dataclasses.replace(model, fused_attention=True), strategy, Mesh()).all
    assert fused == plain - 5 * 32 * 2048**2 * 2
    assert layer_activations(model, strategy, Mesh(sp=4)).all == plain / 4


def test_buffer_sizes_are_those_of_the_deepspeed_configuration() -> None:
    small = BufferSizes.from_deepspeed({"reduce_bucket_size": 1000, "stage3_max_live_parameters": 2e6, "stage": 3})
    assert (small.reduce_bucket, small.max_live, small.prefetch) == (1000, 2_000_000, 50_000_000)
    model, mesh = MODELS["gpt2"], Mesh(dp=2)
    one = MemoryModel(buffers=small).peak(model, Strategy(zero_stage=2), mesh).buffers
    assert one == 2000
    assert MemoryModel(buffers=small).peak(model, Strategy(zero_stage=2, overlap=True), mesh).buffers == 2 * one


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpt-5", "no model is called 'gpt-5'; known models: gpt2"),
        ("layers=2,hiden=8", "unknown size 'hiden'; did you mean hidden?"),
        ("layers=2", "hidden, heads, vocabulary, sequence missing"),
        ("gpt2,layers=many", "layers must be an integer, true or false, not 'many'"),
        ("gpt2,layers=0", "layers must be an integer of at least 1, not 0"),
        ("gpt2,heads=7", "hidden (768) must be a multiple of heads (7)"),
    ],
)
def test_a_model_that_cannot_be_read_is_refused_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_model(text)
    assert says in str(refused.value)


def test_one_size_of_a_named_model_can_be_changed() -> None:
    assert parse_model("llama-3-8b,sequence=32768") == dataclasses.replace(MODELS["llama-3-8b"], sequence=32768)
