"""A model's own forward, called by one stage after another: equal to one call, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic import Pipeline
from elastic.core.errors import UsageError
from elastic.engines.fsdp2.pipeline.layers import cut, prune, put_back, read_layers
from elastic.engines.fsdp2.pipeline.own_forward import OwnForward, require_callable
from elastic.engines.fsdp2.pipeline.passes import Pass

ROW: list[Any] = [("words", "places"), "blocks.*", ("norm", "head")]
WORDS = torch.arange(10).reshape(2, 5) % 7


class Model(nn.Module):
    """As GPT-2's: two embeddings are added, blocks are given a mask, and something is done between and after them."""

    def __init__(self, **does: Any) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(Block(**does) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 7, bias=False)
        self.register_buffer("turns", torch.linspace(1, 2, 5)[:, None], persistent=False)
        self.does, self.passes = does, 0

    def forward(self, words: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.passes += 1
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        first = x
        for number, block in enumerate(self.blocks):
            if self.does.get("skips") == number:
                continue
            if self.does.get("checkpoints"):
                x = checkpoint(block, x, self.turns, use_reentrant=self.does["checkpoints"] == "reentrant")
            elif self.does.get("names"):
                x = block(x=x, turns=self.turns)
            else:
                x = block(x, first if self.does.get("passes on") else self.turns)
            if self.does.get("twice") == number:
                x = block(x, self.turns)
            if self.does.get("changes"):
                self.turns += 1
            x = x * 1.5
        assert self.does.get("adds") or x.dtype == self.words.weight.dtype
        x = self.norm(x + first if self.does.get("adds") else x)
        if self.does.get("takes"):
            x = x + nn.functional.linear(x, self.blocks[0].inner.weight)
        if self.does.get("adds up"):
            x = x + sum(block.uneven for block in self.blocks)
        if self.does.get("comes back"):
            x = self.blocks[0](x, self.turns)
        if self.does.get("calls a part"):
            x = x + self.blocks[0].inner(x)
        x = self.head(x) / 2
        if labels is None:
            return x
        loss = nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss) if self.does.get("names") else (x, loss)


class Block(nn.Module):
    def __init__(self, whole: bool = False, **_: Any) -> None:
        super().__init__()
        self.inner, self.whole, self.uneven = nn.Linear(4, 4), whole, torch.zeros(())

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> Any:
        self.uneven = x.mean()
        return x + torch.tanh(self.inner(x * turns))


def model_of(**does: Any) -> Model:
    torch.manual_seed(1)
    return Model(**does)


def stages_of(
    pipeline: Pipeline, ranks: int, per_rank: int = 1, make: Callable[..., Any] = model_of, **does: Any
) -> list[tuple[Any, OwnForward]]:
    """Each stage's model, of the rank that has it, and what it calls."""
    found = []
    for rank in range(ranks):
        model = make(**does)
        own = cut(pipeline, read_layers(pipeline, model), model, ranks, rank, per_rank)
        prune(model, own)
        found.append((model, OwnForward(model, own, torch.device("cpu"), model.forward, pipeline.loss_fn is None)))
    return [found[stage % ranks] for stage in range(ranks * per_rank)]


def called(stages: list[tuple[Any, OwnForward]], content: Any, step: Any = None) -> tuple[Any, list[int]]:
    """What the last stage gives, and the numbers of the layers, as they were called."""
    numbers: list[int] = []
    given: tuple[Any, ...] = ()
    for stage, (_, forward) in enumerate(stages):
        forward.stage, forward.before = stage, numbers.append
        inputs, named = forward.given(Pass(lambda: content, torch.device("cpu"), step), given)
        output = forward(*inputs, **named)
        given = (output,)
    return given[0], numbers


def pipeline(**more: Any) -> Pipeline:
    return Pipeline(**{"layers": ROW, "own_forward": True, **more})


@pytest.mark.parametrize(("ranks", "per_rank"), [(1, 1), (2, 1), (3, 1), (6, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("names", [False, True])
def test_stages_equal_one_call(ranks: int, per_rank: int, names: bool) -> None:
    whole = model_of(names=names)
    expected = whole(WORDS, labels=WORDS)
    loss = expected.loss if names else expected[1]
    loss.backward()
    stages = stages_of(pipeline(), ranks, per_rank, names=names)
    found, numbers = called(stages, {"words": WORDS, "labels": WORDS})
    assert torch.equal(found, loss)
    assert numbers == list(range(8))
    found.backward()
    gradients = {name: p.grad for model, _ in stages for name, p in model.named_parameters()}
    for name, parameter in whole.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


def test_a_loss_of_ones_own_is_given_what_the_model_gives() -> None:
    asked: list[Any] = []
    stages = stages_of(pipeline(loss_fn=lambda outputs, labels: asked.append((outputs, labels))), 2)
    for content in ((WORDS, "labels"), {"words": WORDS, "labels": "labels"}):
        found, _ = called(stages, content)
        assert torch.equal(found, model_of()(WORDS))


def test_a_head_by_the_embeddings_weight_needs_a_module_that_shares_it() -> None:
    """Where one does, the embedding has it in its place, on the rank that has the head alone."""

    class Shared(Model):
        def __init__(self, **does: Any) -> None:
            super().__init__(**does)
            self.head.weight = self.words.weight

        def forward(self, words: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            x = self.words(words) + self.places(torch.arange(words.shape[1]))
            for block in self.blocks:
                x = block(x, self.turns)
            return self.head(x) + nn.functional.linear(self.norm(x), self.words.weight)

    def made(**_: Any) -> Shared:
        torch.manual_seed(1)
        return Shared()

    found, _ = called(stages_of(pipeline(loss_fn=lambda *_: None), 2, make=made), (WORDS, WORDS))
    assert torch.equal(found, made()(WORDS))


def test_the_model_is_as_it_was_after_a_call_that_fails() -> None:
    (model, forward), _ = stages_of(pipeline(), 2)
    before = dict(model.named_modules())
    forward.given(Pass(lambda: (WORDS[0], None), torch.device("cpu")), ())
    with pytest.raises(TypeError):
        forward(1, 2, 3)
    assert dict(model.named_modules()) == before
    put_back(model)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in model_of().named_parameters()]


TRAINS: Any = SimpleNamespace(samples=None)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ({"twice": 2}, "layer 'blocks.2' is called twice in one pass"),
        ({"twice": 1}, "layer 'blocks.1' is called twice in one pass"),
        ({"skips": 0}, "layer 'blocks.0' was not called before 'blocks.2'"),
        ({"skips": 3}, "layer 'blocks.3' was not called before the end of its forward"),
        ({"skips": 2}, "layer 'blocks.2' was not called before 'blocks.3', which comes later"),
        ({"passes on": True}, "layer 'blocks.2' begins a stage, .* besides its first argument that have gradients"),
        ({"comes back": True}, "layer 'blocks.0' is called after 'norm', which comes later"),
        ({"adds": True}, r"layer 'norm' is called with NaN in stage 1, .* gives \(a skip connection\)"),
        ({"takes": True}, "NaN in stage 1, and the model has asked for blocks.0.inner.weight, words.weight, of"),
        (
            {"adds up": True},
            "the model has asked for blocks.0.uneven, blocks.1.uneven, words.weight, of layers of other stages",
        ),
        ({"calls a part": True}, "layer 'blocks.0' is not called as a whole: 'inner' of it is"),
        ({"changes": True}, "the model's forward has changed the buffer 'turns', which is of no layer"),
        ({"checkpoints": "reentrant"}, "layer 'blocks.0' is called without gradients: a checkpoint around its call"),
    ],
)
def test_a_forward_that_cannot_be_cut_is_refused_by_name(does: dict[str, Any], said: str) -> None:
    begins = {2: ["words", "blocks.2"]}
    with pytest.raises(UsageError, match=said):
        called(stages_of(pipeline(begins=begins), 2, **does), {"words": WORDS, "labels": WORDS}, TRAINS)


def test_layers_that_are_named_in_another_order_are_refused() -> None:
    for row, said in (
        ([("norm", "head"), "blocks.*", ("words", "places")], "'norm' was not called before 'words'"),
        ([("words", "places"), ("norm", "head"), "blocks.*"], "'norm' was not called before 'blocks.0'"),
    ):
        with pytest.raises(UsageError, match=said):
            called(stages_of(pipeline(layers=row), 3), {"words": WORDS, "labels": WORDS}, TRAINS)


def test_what_follows_from_earlier_layers_besides_shows() -> None:
    """Also where nothing of it has a gradient; and where it is used at the end of a later pass than the first."""
    stages = stages_of(pipeline(), 2, **{"passes on": True})
    with torch.no_grad(), pytest.raises(UsageError, match="follow from layers of earlier stages"):
        called(stages, (WORDS, WORDS))
    adding: dict[str, Any] = {}
    stages = stages_of(pipeline(), 2, **{"adds": adding})
    assert called(stages, {"words": WORDS, "labels": WORDS})[0].isfinite()
    for model, _ in stages:
        model.does["adds"] = True
    assert called(stages, {"words": WORDS, "labels": WORDS})[0].isnan()


def test_nan_of_a_models_own_is_no_skip_connection() -> None:
    """A sample that is none, weights that have run away: the run's policy decides."""
    stages = stages_of(pipeline(), 2)
    for model, _ in stages:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name == "blocks.3.inner.weight":
                    parameter.fill_(torch.nan)
    assert called(stages, {"words": WORDS, "labels": WORDS})[0].isnan()


def test_a_checkpoint_around_a_layers_call_is_refused_in_its_backward_pass() -> None:
    found, _ = called(stages_of(pipeline(), 1, checkpoints="other"), {"words": WORDS, "labels": WORDS}, TRAINS)
    with pytest.raises(UsageError, match="is computed again outside of the model's forward"):
        found.backward()


def _wrong(change: Callable[[Any], Any]) -> Any:
    model = model_of()
    change(model)
    return model


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        (_wrong(lambda model: model.compile(backend="eager")), {}, "the model is compiled as a whole, and its layers"),
        (torch.compile(model_of(), backend="eager"), {}, "the model is compiled as a whole, and its layers"),
        (
            _wrong(lambda model: setattr(model, "config", SimpleNamespace(output_router_logits=True))),
            {},
            "the model has output_router_logits",
        ),
        (model_of(), {"layers": None}, "nothing says which layers Model has"),
        (model_of(), {"layers": ["blocks.*", "head"]}, "'words.weight' is of no layer"),
        (model_of(), {"own_forward": False}, "layers has .'words', 'places'. as one element"),
        (model_of(), {"own_forward": False, "layers": ["words", "places"]}, "no loss_fn"),
        (model_of(), {"begins": {2: ["words", "places"]}}, "begins for 2 stages must name 2 layers in their order"),
    ],
)
def test_models_and_rows_that_cannot_be_are_refused_by_name(model: nn.Module, more: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        cut_up(pipeline(**more), model)


def cut_up(given: Pipeline, model: nn.Module) -> None:
    row = read_layers(given, model)
    require_callable(model, row)
    cut(given, row, model, 2, 0)


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(UsageError, match="has no loss_fn, and Model gives no mean loss"):
        called(stages_of(pipeline(), 2), {"words": WORDS})
