"""Models of transformers, of many families, in three stages that call their own forward: bit for bit one call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_own_forward import called, stages_of

from elastic import Pipeline

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")

WORDS = torch.randint(1, 20, (2, 8), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
}
OF_OPT = {"ffn_dim": 24, "word_embed_proj_dim": 16}
# Those with a plan.
PLAIN = [
    "Cohere", "Ernie4_5", "Exaone4", "GPTNeoX", "Gemma", "Gemma2", "Glm", "Glm4", "Granite", "Helium", "Llama",
    "Mistral", "Olmo", "Olmo2", "Olmo3", "Phi", "Phi3", "Qwen2", "Qwen3", "SmolLM3", "Starcoder2",
]  # fmt: skip
# By what their configurations need besides.
PLANNED: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN},
    "DeepseekV3": LATENT,
    "GptOss": {"num_local_experts": 4},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": MOE,
}
# Others, by their rows.
ROWS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "GPT2": (
        {"n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 16, "vocab_size": 20},
        [("transformer.wte", "transformer.wpe"), "transformer.h.*", ("transformer.ln_f", "lm_head")],
    ),
    "OPT": (
        {**SIZES, **OF_OPT},
        [
            ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
            "model.decoder.layers.*",
            ("model.decoder.final_layer_norm", "lm_head"),
        ],
    ),
    "Nemotron": (SIZES, ["model.embed_tokens", "model.layers.*", "model.norm", "lm_head"]),
    "Mamba": (SIZES, ["backbone.embeddings", "backbone.layers.*", "backbone.norm_f", "lm_head"]),
}


def built(family: str, sizes: dict[str, Any]) -> Any:
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{head}")(getattr(transformers, f"{family}Config")(**sizes))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


@pytest.mark.parametrize("family", [*PLANNED, *ROWS])
def test_a_model_in_stages_equals_one_call(family: str) -> None:
    sizes, row = ROWS.get(family) or ({**SIZES, **PLANNED[family]}, None)
    content, pipeline = {"input_ids": WORDS, "labels": WORDS}, Pipeline(layers=row, own_forward=True)
    whole = built(family, sizes)
    loss = whole(**content).loss
    loss.backward()
    stages = stages_of(pipeline, 3, make=built, family=family, sizes=sizes)
    found, _ = called(stages, content, SimpleNamespace(samples=None))
    assert torch.equal(found, loss)
    found.backward()
    # What is tied lies in two stages.
    sums: dict[str, torch.Tensor] = {}
    for name, parameter in (each for model, _ in stages for each in model.named_parameters()):
        if parameter.grad is not None:
            sums[name] = sums.get(name, torch.zeros(())) + parameter.grad
    trained = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    assert sums.keys() == trained.keys()
    for name, gradient in trained.items():
        assert torch.equal(sums[name], gradient), name
