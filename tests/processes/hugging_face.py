"""Training functions over models of transformers, built from their configurations: tiny, and otherwise as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cells
import compiled
import crew
import torch
import trainings
from texts import Text, Texts

import elastic

VOCABULARY, LENGTH, HEADS = 20, 8, 4
PADDING, IGNORED = 0, -100
# Layers that are shared, by names alone: whatever is in `qkv_proj`.
UNDESCRIBED = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.qkv_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"},
    ],
}


def texts(config: dict[str, Any]) -> Texts:
    return Texts(ragged if config.get("ragged") else text, 37, crew.indices)


def text(index: int) -> Text:
    """Models of transformers shift the labels themselves."""
    words = torch.randint(1, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
    return words, words


def ragged(index: int) -> Text:
    """Padded on the left, so that parts of a sequence have different numbers of tokens, and may have none."""
    words, padding = text(index)[0].clone(), index % (LENGTH - 1)
    words[:padding] = PADDING
    return words, words.masked_fill(words == PADDING, IGNORED)


def model_of(config: dict[str, Any]) -> Any:
    """`family`, and keys of its configuration in `model`."""
    # Where there is a generation only: forks of the process that runs the tests do not all need it.
    import transformers

    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PADDING}
    names = {"vocab_size": VOCABULARY, **tokens}
    if config["family"] == "GPT2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": HEADS, "n_positions": LENGTH}
        # On unless it is said, and drawn by part.
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        made = transformers.GPT2Config(**{**names, **sizes, **config.get("model", {})})
        return _adapted(_seeded(transformers.GPT2LMHeadModel, made), config)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
    }
    kind = getattr(transformers, f"{config['family']}Config")
    model = _seeded(
        getattr(transformers, f"{config['family']}For{config.get('head', 'CausalLM')}"),
        kind(**{**names, **sizes, **config.get("model", {})}),
    )
    return _adapted(model, config)


def _adapted(model: Any, config: dict[str, Any]) -> Any:
    """With `adapters`: keys of PEFT's configuration, or True."""
    if not config.get("adapters"):
        return model
    import peft

    given = {"target_modules": ["q_proj", "v_proj"], **(config["adapters"] if config["adapters"] is not True else {})}
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **given))


def _seeded(kind: Callable[[Any], Any], config: Any) -> Any:
    torch.manual_seed(3)
    return kind(config)


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    model = model_of(config).to(config.get("device", "cpu"), getattr(torch, config.get("precision", "float32")))
    # The small number is above the rounding of gradients where a token in a thousand chooses an expert.
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.get("rate", 0.02), eps=config.get("eps", 1e-8))
    options = trainings.of_engine(config, optimizer)
    options["config"] |= config.get("native", {})
    options |= {"weights": config["weights"]} if "weights" in config else {}
    engine, _, loader, _ = elastic.initialize(model=model, training_data=texts(config), optimizer=optimizer, **options)
    return engine, loader


def train(config: dict[str, Any]) -> Any:
    """As a script without a mesh does it; the engine."""

    def loss_of(engine: Any, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = engine(input_ids=words, labels=labels, attention_mask=mask_of(config, words)).loss
        return found

    return _train(config, loss_of)


def train_on_parts(config: dict[str, Any]) -> None:
    from elastic.integrations import sequences

    def loss_of(engine: Any, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        part = sequences.part(input_ids=words, attention_mask=mask_of(config, words))
        if config.get("mistake") == "no positions":
            del part["position_ids"]
        if config.get("mistake") == "mask of a part":
            part["attention_mask"] = elastic.sequence.split(torch.ones_like(words))
        return sequences.loss(engine(**part).logits, labels)

    _train(config, loss_of)


# The layers of families without a plan, in the order in which they call them.
ROWS: dict[str, Any] = {
    "GPT2": [("transformer.wte", "transformer.wpe"), "transformer.h.*", ("transformer.ln_f", "lm_head")],
}


def train_in_stages(config: dict[str, Any]) -> None:
    """Of the model as it is, which gives its loss; or over parts of sequences by `sequences.loss`."""
    cells.begun()
    options: dict[str, Any] = {"own_forward": True}
    if config.get("sequences"):
        # Before the model is built, which asks for it.
        from elastic.integrations import sequences
    with torch.device("meta" if config.get("deferred") else "cpu"):
        model = model_of(config)
    if config.get("sequences"):
        model.model.register_forward_pre_hook(lambda _, given, named: (given, _part(named)), with_kwargs=True)
        options["loss_fn"] = lambda outputs, labels: sequences.loss(outputs.logits, labels)
    if config.get("compiled"):
        compiled.by(config["compiled"], model, model.model.layers)
    if config.get("recomputed"):
        model.gradient_checkpointing_enable()
    model.register_forward_pre_hook(lambda *_: _stay(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.get("rate", 0.02), eps=config.get("eps", 1e-8))
    given = trainings.of_engine(config, optimizer)
    given["config"] |= config.get("native", {})
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=texts(config),
        optimizer=optimizer,
        collate_fn=lambda samples: _named(config, samples),
        pipeline=elastic.Pipeline(layers=ROWS.get(config["family"]), **options),
        **given,
    )
    elastic.state["starts"] = elastic.state.get("starts", 0) + 1
    steps, abandoned = dict[int, float](), 0
    for _ in elastic.epochs():
        for batches in loader:
            loss = float(engine.train_batch(batches))
            if elastic.get_context().abandoned:
                abandoned += 1
                continue
            steps[elastic.get_context().step] = loss
    held = [_named(config, [text(number)]) for number in range(3)]
    cells.told(steps=steps, abandoned=abandoned, evaluated=float(engine.eval_batch(held, 3)))


def _stay(config: dict[str, Any]) -> None:
    """The ranks in `config["victims"]` stay in their pass in step `config["at"]`, for ever."""
    context = elastic.get_context()
    if config.get("at") == context.step and context.world_size == config["ranks"]:
        crew.point("there")
        if context.rank in config["victims"]:
            crew.stay()


def _named(config: dict[str, Any], samples: list[Text]) -> dict[str, torch.Tensor]:
    """As a collator of transformers gives them."""
    words, labels = (torch.stack(part) for part in zip(*samples, strict=True))
    mask = mask_of(config, words)
    return {"input_ids": words, "labels": labels} | ({} if mask is None else {"attention_mask": mask})


def _part(named: dict[str, Any]) -> dict[str, Any]:
    from elastic.integrations import sequences

    whole = {name: named.pop(name) for name in ("input_ids", "attention_mask") if named.get(name) is not None}
    return {**named, **sequences.part(**whole)}


def mask_of(config: dict[str, Any], words: torch.Tensor) -> torch.Tensor | None:
    return (words != PADDING).long() if config.get("ragged") else None


def train_and_answer(config: dict[str, Any]) -> None:
    """As `train`; then the trained model's own answers to `questions`, each rank's."""
    engine = train(config)
    engine.eval()
    with torch.no_grad():
        cells.told(logits=engine(input_ids=questions()).logits.float().clone())


def questions() -> torch.Tensor:
    return torch.stack([text(1000 + number)[0] for number in range(3)])


def _train(config: dict[str, Any], loss_of: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    cells.begun()
    engine, loader = build(config)
    elastic.state["starts"] = elastic.state.get("starts", 0) + 1
    for _ in elastic.epochs():
        for words, labels in loader:
            engine.backward(loss_of(engine, words, labels))
            engine.step()
    cells.told()
    return engine
