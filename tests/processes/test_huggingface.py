"""Models of transformers on the meshes, as their configurations build them: Llama, Phi-3, GPT-2, Mixtral.

The oracles are one rank with the whole model, and transformers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
from cells import LAST_STEP, MOVED, WHOLE, Part, Run, assert_every_sample_once, of_run
from crew import Crew
from hugging_face import HEADS, UNDESCRIBED, model_of, text
from layered_model import SHARES
from safetensors.torch import load_file
from test_oracle import _distance

import elastic

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

pytestmark = pytest.mark.processes

# Slices are multiplied apart and added up in another order, and Adam divides by what may be small.
ALLOWED = 1e-5
SLOW = pytest.mark.slow
# All linear layers of a Llama, and a copy of one that is trained in its place.
ADAPTED: dict[str, Any] = {
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "modules_to_save": ["lm_head"],
}
TIED, BIASED = {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}
LLAMA: dict[str, Any] = {"family": "Llama"}
# No kernel for groups of tokens on a CPU.
AUTOEP = {"expert_parallel": {"enabled": True, "preset_model": "mixtral", "use_grouped_mm": False}}
# With the loss that spreads tokens over experts, of the routers' logits.
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.05}
# Of Adam: above the rounding of gradients by which it divides where there is next to none.
EPS = 1e-5


def through(
    crew: Crew, url: Path, config: Mapping[str, Any], parts: Sequence[Part], function: str = "train", **spec: Any
) -> Run:
    generations = cells.through(crew, url, f"hugging_face.{function}", config, parts, **spec)
    # torch cuts a matrix of several projections as one.
    return Run(url, generations, spec.get("tp", 1), {} if config.get("engine") == "fsdp2" else SHARES)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"stage": 1}, id="stage1"),
        pytest.param({"stage": 3, "model": TIED, "in_loop": True}, id="stage3-tied-in-loop"),
        pytest.param({"stage": 1, "model": BIASED, "in_loop": True}, id="stage1-biases-in-loop", marks=SLOW),
        pytest.param({"engine": "fsdp2"}, id="fsdp2", marks=SLOW),
        pytest.param({"engine": "fsdp2", "model": TIED, "in_loop": True}, id="fsdp2-tied-in-loop"),
        *(pytest.param({"stage": stage, "model": TIED}, id=f"stage{stage}-tied", marks=SLOW) for stage in (0, 1, 2, 3)),
        pytest.param({"stage": 2, "model": BIASED}, id="stage2-biases", marks=SLOW),
        pytest.param({"engine": "fsdp2", "model": BIASED, "eps": EPS}, id="fsdp2-biases", marks=SLOW),
        pytest.param({"engine": "fsdp2", "family": "Phi3"}, id="fsdp2-phi3", marks=SLOW),
        # The gradient of its keys' bias is rounding.
        pytest.param({"engine": "fsdp2", "family": "GPT2", "eps": EPS, "in_loop": True}, id="fsdp2-gpt2"),
        # Its norms make gradients so small that Adam, with its usual small number, carries their rounding into weights.
        pytest.param({"engine": "fsdp2", "family": "Olmo2", "eps": 1e-4}, id="fsdp2-olmo2", marks=SLOW),
    ],
)
def test_llama_with_shared_layers_equals_one_rank_with_whole_ones(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    """Heads of keys and values are half as many; the layers are cut by the model's own plan."""
    config = {**LLAMA, **config}
    whole = through(crew, tmp_path / "whole", config, WHOLE)
    moved = through(crew, tmp_path / "moved", config, MOVED, tp=2)
    assert cells.left(crew) <= {cells.STOOD_BY}
    halved = {"GPT2": ("transformer.h.1.attn.c_proj.weight", (8, 16))}.get(config["family"])
    name, shape = halved or ("model.layers.1.self_attn.o_proj.weight", (16, 8))
    assert moved.shapes[0][name] == shape, "half of it"
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(whole.shapes[0]), moved.state(whole.shapes[0])) <= ALLOWED
    assert_every_sample_once(moved)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"family": "Llama", "adapters": ADAPTED, "in_loop": True}, id="llama"),
        # The loss is in fp32, whose rounding a curve with larger steps makes 1e-4 of, with two data ranks and no mesh.
        pytest.param(
            {"family": "GPT2", "adapters": {"target_modules": ["c_attn", "c_proj", "c_fc"]}, "rate": 0.002},
            id="transposed",
            marks=SLOW,
        ),
    ],
)
def test_adapters_on_shared_layers_equal_one_rank_with_whole_ones(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    """Cut with their layers: of one by columns the second matrix, of one by rows the first."""
    # Adam carries the rounding of small gradients into weights in fp32: to 1.1e-5.
    config = {"engine": "fsdp2", "precision": "float64", **config}
    whole = through(crew, tmp_path / "whole", config, WHOLE)
    moved = through(crew, tmp_path / "moved", config, MOVED, tp=2)
    assert cells.left(crew) <= {cells.STOOD_BY}
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(whole.shapes[0]), moved.state(whole.shapes[0])) <= ALLOWED
    assert_every_sample_once(moved)
    if config["family"] == "Llama":
        layer = "base_model.model.model.layers.0"
        assert moved.shapes[0][f"{layer}.self_attn.q_proj.lora_B.default.weight"] == (8, 2)
        assert moved.shapes[0][f"{layer}.mlp.down_proj.lora_A.default.weight"] == (2, 12)
    folders = [elastic.export(url / "run", url / "hf", to="hf") for url in (tmp_path / "whole", tmp_path / "moved")]
    wanted, found = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=ALLOWED, atol=ALLOWED)


def test_one_rank_equals_transformers_alone(crew: Crew, tmp_path: Path) -> None:
    """What the oracle above is worth."""
    whole = through(crew, tmp_path, {**LLAMA, "stage": 1, "schedule": False}, WHOLE)
    (outcome,) = whole.outcomes
    losses = alone(outcome.indices)
    assert len(losses) == LAST_STEP
    assert losses == pytest.approx([float(whole.losses[f"loss {step}"]) for step in range(1, LAST_STEP + 1)], abs=1e-5)


def alone(indices: Sequence[int]) -> list[float]:
    """The loss of each step of ten samples, and of a last one of the rest."""
    model = model_of(LLAMA)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.02), []
    for begin in range(0, len(indices), 10):
        words = torch.stack([text(index)[0] for index in indices[begin : begin + 10]])
        loss = model(input_ids=words, labels=words).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"family": "GPT2", "stage": 1}, "'transformer.h.0.attn.c_attn' of GPT2LMHeadModel is a Conv1D"),
        (
            {**LLAMA, "stage": 2, "adapters": True},
            "q_proj' of PeftModel has an adapter of PEFT, which AutoTP does not know",
        ),
        (
            {**LLAMA, "engine": "fsdp2", "adapters": {"use_dora": True}},
            "q_proj' has an adapter of PEFT (Linear) that cannot be cut with the layer",
        ),
        (
            {"family": "Phi3", "stage": 1},
            "AutoTP refuses this model or its configuration: HuggingFace tp_plan contains",
        ),
        (
            {"family": "Mixtral", "stage": 1},
            "AutoTP refuses this model or its configuration: HuggingFace tp_plan contains",
        ),
        (
            {"family": "Mixtral", "engine": "fsdp2"},
            "the model has no module 'model.layers.*.mlp.experts.gate_up_proj'",
        ),
        (
            {"family": "Phi3", "stage": 1, "native": {"tensor_parallel": {"partition_config": UNDESCRIBED}}},
            "'model.layers.0.self_attn.qkv_proj' holds several projections",
        ),
        (
            {**LLAMA, "stage": 1, "model": {"num_key_value_heads": 1}},
            "leaves a worker without any part of 'model.layers.0.self_attn.q_proj'",
        ),
        (
            {**LLAMA, "engine": "fsdp2", "model": {"num_key_value_heads": 1}},
            "'model.layers.0.self_attn.k_proj' has 1 heads, which 2 workers cannot share evenly",
        ),
    ],
)
def test_models_whose_layers_cannot_be_shared_are_refused_by_name(
    crew: Crew, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    outcomes = crew.run(range(2), "hugging_face.train", {**config, "url": str(tmp_path)}, tp=2, **of_run(config))
    for outcome in outcomes:
        assert outcome.result.kind == "usage_error", outcome.result
        assert said in outcome.result.message
        assert outcome.reports == []


@pytest.mark.parametrize(
    "config",
    [
        {"family": "Bloom", "model": {"n_layer": 2, "n_head": HEADS}},
        {"family": "Falcon", "model": {"num_kv_heads": 2, "new_decoder_architecture": True}},
    ],
)
def test_what_layers_that_are_cut_ask_of_a_model_is_said_where_its_code_fails(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    config = {**config, "stage": 1, "url": str(tmp_path)}
    for outcome in crew.run(range(2), "hugging_face.train", config, tp=2, **of_run(config)):
        assert outcome.result.kind == "user_error", outcome.result
        assert "Its code must take numbers of heads from the shape of what projections give" in outcome.result.message
        assert outcome.reports == []


ELASTIC = {"attn_implementation": "elastic"}


@pytest.mark.parametrize(
    ("config", "sp"),
    [
        pytest.param({"stage": 1, "ragged": True}, 2, id="stage1-padded"),
        pytest.param({"stage": 3}, 2, id="stage3", marks=SLOW),
        pytest.param({"stage": 2, "ragged": True}, 4, id="stage2-more-parts-than-key-heads"),
        pytest.param({"engine": "fsdp2", "model": TIED, "ragged": True, "in_loop": True}, 2, id="fsdp2-tied-in-loop"),
        # The bias of keys has no gradient but rounding, which Adam would make as large as any other.
        pytest.param({"family": "GPT2", "stage": 1, "eps": EPS}, 2, id="gpt2"),
        pytest.param({"family": "Mistral", "stage": 1, "model": {"sliding_window": 3}}, 2, id="sliding", marks=SLOW),
    ],
)
def test_shared_sequences_equal_a_script_of_transformers_alone(
    crew: Crew, tmp_path: Path, config: dict[str, Any], sp: int
) -> None:
    """The model has "elastic" for its attention, and that of the other run transformers' own, with its own loss."""
    config = {**LLAMA, **config}
    own = config.get("model", {})
    parts = MOVED if sp == 2 else [((0, 1, 2, 3), None)]
    whole = through(crew, tmp_path / "whole", {**config, "in_loop": False}, WHOLE)
    shared = through(crew, tmp_path / "shared", {**config, "model": {**own, **ELASTIC}}, parts, "train_on_parts", sp=sp)
    assert _distance(whole.losses, shared.losses) <= ALLOWED
    assert _distance(whole.state(), shared.state()) <= ALLOWED
    assert_every_sample_once(shared)


@pytest.mark.parametrize("model", [TIED, pytest.param({}, marks=SLOW)], ids=["tied", "untied"])
def test_llama_with_shared_sequences_and_layers_equals_a_script_of_transformers_alone(
    crew: Crew, tmp_path: Path, model: dict[str, Any]
) -> None:
    """One head of keys and values for each worker's slice; the layers are cut by the model's own plan."""
    config = {**LLAMA, "engine": "fsdp2", "ragged": True, "model": model}
    parts: Sequence[Part] = (((0, 1, 2, 3), 3), ((2, 0), 5, {"tp": 1}), ((1, 3, 0, 2), None))
    whole = through(crew, tmp_path / "whole", config, WHOLE)
    config = {**config, "model": {**model, **ELASTIC}, "in_loop": True}
    moved = through(crew, tmp_path / "moved", config, parts, "train_on_parts", sp=2, tp=2, tp_sizes=(1, 2))
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    assert _distance(whole.state(whole.shapes[0]), moved.state(whole.shapes[0])) <= ALLOWED
    assert_every_sample_once(moved)


def test_a_script_for_shared_sequences_trains_without_a_mesh(crew: Crew, tmp_path: Path) -> None:
    config = {**LLAMA, "stage": 1, "ragged": True}
    alone = through(crew, tmp_path / "alone", config, WHOLE)
    parts = through(crew, tmp_path / "parts", {**config, "model": ELASTIC}, WHOLE, "train_on_parts")
    assert _distance(alone.losses, parts.losses) <= ALLOWED
    assert _distance(alone.state(), parts.state()) <= ALLOWED


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"mistake": "no positions"}, "LlamaAttention is given other position ids than its tokens' places, 4 to 7"),
        ({"model": {}}, "the model has not attended to whole sequences since sequences.part was called"),
        ({"mistake": "mask of a part"}, "attention_mask has 4 places and whole sequences have 8: give it whole"),
        (
            {"family": "Gemma2", "model": {"head_dim": 4, **ELASTIC}},
            "attention of Gemma2Attention has softcap, which is not supported over shared sequences",
        ),
    ],
)
def test_what_would_be_wrong_over_shared_sequences_is_refused_by_name(
    crew: Crew, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    config = {**LLAMA, "stage": 1, "model": ELASTIC, **config, "url": str(tmp_path)}
    crew.begin(range(2), "hugging_face.train_on_parts", config, sp=2, **of_run(config))
    # Of a worker alone where it has one part in another place; the other one then waits for it.
    assert crew.outcome(1).result.kind == "usage_error", crew.outcome(1).result
    assert said in crew.outcome(1).result.message
    crew.abort(0, "rank 1 has left")
    assert crew.outcome(0).reports == []


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"stage": 1, "model": {**TIED, **BALANCED}, "in_loop": True}, id="stage1-tied-balanced-in-loop"),
        pytest.param({"stage": 2}, id="stage2"),
        pytest.param({"stage": 0, "clipping": 0, "model": BALANCED}, id="stage0-balanced", marks=SLOW),
        pytest.param({"stage": 3, "model": BALANCED}, id="stage3-balanced", marks=SLOW),
        pytest.param({"stage": 3, "model": BALANCED, "in_loop": True}, id="stage3-balanced-in-loop", marks=SLOW),
    ],
)
def test_mixtral_with_shared_experts_equals_one_rank_without_autoep(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    """The other run has transformers' own layers of experts."""
    config = {"family": "Mixtral", "eps": EPS, **config}
    whole = through(crew, tmp_path / "whole", config, WHOLE)
    moved = through(crew, tmp_path / "moved", {**config, "native": AUTOEP}, MOVED, ep=2)
    assert cells.left(crew) <= {cells.STOOD_BY}
    assert [outcome.told["coordinates"]["ep"] for outcome in moved.outcomes[-4:]] == [0, 1, 0, 1]
    assert_equal_by_autoep(whole, moved)


def test_mixtral_with_shared_experts_and_sequences_equals_one_rank_without(crew: Crew, tmp_path: Path) -> None:
    config = {"family": "Mixtral", "eps": EPS, "stage": 2}
    parts: Sequence[Part] = (((0, 1, 2, 3), 3), ((2, 0), 5, {"ep": 1}), ((1, 3, 0, 2), None))
    whole = through(crew, tmp_path / "whole", config, WHOLE)
    config |= {"native": AUTOEP, "model": ELASTIC}
    moved = through(crew, tmp_path / "moved", config, parts, "train_on_parts", ep=2, ep_sizes=(1, 2), sp=2)
    assert [outcome.told["coordinates"]["ep"] for outcome in moved.outcomes[-4:]] == [0, 0, 1, 1]
    assert_equal_by_autoep(whole, moved)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_mixtral_with_shared_experts_and_layers_equals_one_rank_without(crew: Crew, tmp_path: Path, stage: int) -> None:
    attention = [
        {"patterns": [r".*\.[qkv]_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"},
    ]
    layers = {"partition_config": {"use_default_specs": False, "layer_specs": attention}}
    config = {"family": "Mixtral", "eps": EPS, "stage": stage}
    both = {"ep": 2, "tp": 2}
    # Alone at last a rank has all of each tensor.
    parts: Sequence[Part] = (((0, 1, 2, 3), 3, both), ((2, 0), 5, {"tp": 2}), ((1, 3, 0, 2), 7, both), ((3,), None))
    whole = through(crew, tmp_path / "whole", config, WHOLE)
    config |= {"native": {**AUTOEP, "tensor_parallel": layers}}
    moved = through(crew, tmp_path / "moved", config, parts, ep_sizes=(1, 2), tp_sizes=(1, 2))
    assert_equal_by_autoep(whole, moved)


def assert_equal_by_autoep(whole: Run, moved: Run) -> None:
    assert _distance(whole.losses, moved.losses) <= ALLOWED
    expected, found = named_as_by_autoep(whole), moved.state()
    assert _distance(expected, {name: found[name] for name in expected}) <= ALLOWED
    assert_every_sample_once(moved)


def named_as_by_autoep(run: Run) -> dict[str, torch.Tensor]:
    """Gate and up projections of experts are two tensors, and a layer's gate is its router's."""
    found = {}
    for key, value in run.state().items():
        if key.endswith("experts.gate_up_proj"):
            name = key.split("/", 1)[1]
            parts = value.view(run.shapes[0][name]).chunk(2, dim=1)
            for own, part in zip(("w1", "w3"), parts, strict=True):
                found[key.replace("gate_up_proj", own)] = part.flatten()
        else:
            found[key.replace("experts.down_proj", "experts.w2").replace("mlp.gate", "mlp.router.gate")] = value
    return found
