"""A loop over `elastic.initialize` with a model of transformers', which saves it as scripts for one process do."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import elastic

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def saves(config: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    other: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    if config.get("lora"):
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    rows = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(1))
    engine, _, loader, _ = elastic.initialize(model=model, optimizer=optimizer, training_data=list(rows))
    for step, batch in enumerate(loader):
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        if step + 1 == config.get("leaves at"):
            break
    first, saved = elastic.get_context().rank == 0, config["saves"]
    if first:
        other.save_pretrained(f"{saved}/other")
    match config["how"]:
        case "all":
            engine.module.save_pretrained(saved, is_main_process=first)
        case "nodes":
            engine.module.save_pretrained(saved, is_main_process=True)
        case "part":
            engine.module.model.save_pretrained(saved, is_main_process=first)
        case "given":
            weights = engine.whole_weights()
            if first:
                engine.module.save_pretrained(saved, state_dict=weights)
        case "first":
            if first:
                engine.module.save_pretrained(saved)
        case "around":
            _Around(engine.module).save_pretrained(saved, is_main_process=first)


class _Around(transformers.LlamaPreTrainedModel):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner.config)
        self.inner = inner
