"""What DeepSpeed puts into the places of a model's layers is taken out again; what the script has added is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic.engines.deepspeed.belongings import Structure
from elastic.engines.model.placeholders import is_placeholder, placeholder, renew_accumulator


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 1000
        self.calls = 1000
        self.project = nn.Linear(6, 4)
        # Nothing is in it.
        self.drop = nn.Identity()


class Sliced(nn.Module):
    """As AutoTP's layers: with the parameters of the one that was there."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.weight.data = self.weight.data[:2].clone()


@pytest.fixture
def model() -> Heads:
    return Heads()


@pytest.fixture
def structure(model: Heads) -> Structure:
    """Of the model, in which a layer is sliced now."""
    found = Structure(model)
    model.project = Sliced(model.project)  # type: ignore[assignment]
    model.heads = 500
    found.built()
    return found


def test_the_layers_and_numbers_of_before_come_back(model: Heads, structure: Structure) -> None:
    weight = model.project.weight
    model.calls = 2000
    model.eval()
    assert structure.obstacle() is None
    structure.give_back()
    assert isinstance(model.project, nn.Linear)
    assert model.project.weight is weight
    assert (model.heads, model.calls) == (1000, 2000), "what was changed since is the script's"
    assert not model.project.training


def test_what_the_script_puts_on_a_layer_of_deepspeeds_is_named(model: Heads, structure: Structure) -> None:
    model.drop.register_forward_hook(lambda *_: None)
    assert structure.obstacle() is None, "it stays"
    handle = model.project.register_forward_hook(lambda *_: None)
    assert "hooks or attributes were put on a Sliced" in str(structure.obstacle())
    handle.remove()
    assert structure.obstacle() is None
    model.project.scale = 2.0  # type: ignore[assignment]
    assert "hooks or attributes were put on a Sliced" in str(structure.obstacle())


def test_another_layer_of_the_scripts_is_named(model: Heads, structure: Structure) -> None:
    model.project = nn.Linear(6, 4)
    assert structure.obstacle() == "the model has another 'project' than the one that DeepSpeed has made for it"


def test_a_parameter_of_another_shape_gets_gradients_of_that_shape_while_an_old_loss_is_held() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    held = (parameter.t() @ torch.ones(3)).sum()
    parameter.data = placeholder(parameter, (5, 2))
    assert is_placeholder(parameter)
    assert not is_placeholder(torch.ones(()).expand(1))
    parameter.data = torch.ones(5, 2)
    renew_accumulator(parameter)
    (parameter.t() @ torch.ones(5)).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.shape == (5, 2)
    assert held.item() == 6.0
