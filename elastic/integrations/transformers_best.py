"""The best weights of a Trainer's run (`load_best_model_at_end`): written while all wait, as transformers writes them,
to the run's own storage, which outlives the node of rank 0."""

from __future__ import annotations

import glob
import logging

import torch
import torch.distributed as dist

from elastic.comm.agreement import Agreement
from elastic.core.errors import ElasticError
from elastic.engines.model.plain_names import named_buffers, named_parameters
from elastic.interchange.safetensors_files import put_safetensors
from elastic.store.open import open_objects
from elastic.training.engine import ElasticEngine
from elastic.training.scope import GenerationScope

logger = logging.getLogger(__name__)

_FOLDER = "best"


class BestWeights:
    """Of one run. Below `<checkpoint.url>/<run id>`; of a script outside of a run, below `output_dir`."""

    def __init__(self, scope: GenerationScope, output_dir: str, step: int | None) -> None:
        """`step`: of those that are written already."""
        self._rank, self._device = scope.spec.rank, scope.device
        self._url = f"{scope.coordinator.folder() or output_dir}/{_FOLDER}"
        self.step = step

    @property
    def folder(self) -> str | None:
        """Where they are; None as long as there are none."""
        return None if self.step is None else f"{self._url}/{_name(self.step)}"

    def write(self, engine: ElasticEngine, model: torch.nn.Module, step: int) -> None:
        """Those of `step`, which is now. The best until now stay: the step may be lost, and another one be the better.

        Collective; raises StorageError or UsageError on all ranks or on none."""
        if step == self.step:
            return
        weights, error = engine.whole_weights(_trained(model)), None
        if self._rank == 0:
            try:
                self._write(weights, step)
            except ElasticError as caught:
                error = caught
        assert dist.group.WORLD is not None
        Agreement(dist.group.WORLD, self._device).raise_together(error, f"saving the best weights, of step {step}")
        self.step = step

    def load(self, engine: ElasticEngine, model: torch.nn.Module) -> None:
        """Into the model, for what follows its training. Collective; see `ElasticEngine.load_weights`."""
        assert self.folder is not None
        frozen = [glob.escape(name) for name, each in named_parameters(model) if not each.requires_grad]
        engine.load_weights(self.folder, allow_missing=frozen)
        logger.info("the model has the weights of step %d, the best", self.step)

    def _write(self, weights: dict[str, torch.Tensor], step: int) -> None:
        objects = open_objects(self._url)
        put_safetensors(objects, f"{_name(step)}/model.safetensors", weights)
        kept = {_name(each) for each in (step, self.step) if each is not None}
        objects.remove([path for path in objects.sizes("", unfinished=True) if path.partition("/")[0] not in kept])


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _trained(model: torch.nn.Module) -> set[str]:
    """What training changes: of a model with adapters these alone."""
    names = {name for name, each in named_parameters(model) if each.requires_grad}
    return names | {name for name, _ in named_buffers(model)}
