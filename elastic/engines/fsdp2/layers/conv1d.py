"""Styles of torch for the `Conv1D` of transformers (GPT-2's matrices), whose weight is [input, output]: they cut in one
dimension what torch cuts of a linear layer's in the other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from elastic.engines.model.shared_layers import is_conv1d

# Of GPT-2 and models made like it. Query, key and value are one matrix, of which each rank computes some columns and
# has all: heads are not shared. Embeddings, which are the head's too, stay whole.
PLAN: Mapping[str, str] = {
    "*.h.*.attn.c_attn": "colwise_gather_output",
    "*.h.*.attn.c_proj": "rowwise_split_input",
    "*.h.*.mlp.c_fc": "colwise",
    "*.h.*.mlp.c_proj": "rowwise",
}


class TransposedColwise(ColwiseParallel):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _distributed(self, module, device_mesh, {"weight": Shard(1), "bias": Shard(0)})


class TransposedRowwise(RowwiseParallel):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.desired_input_layouts = (Shard(-1),)
        return _distributed(self, module, device_mesh, {"weight": Shard(0), "bias": Replicate()})


def for_module(style: ParallelStyle, module: nn.Module) -> ParallelStyle:
    """`style`, or what it is of a `Conv1D`."""
    transposed = {ColwiseParallel: TransposedColwise, RowwiseParallel: TransposedRowwise}.get(type(style))
    if transposed is None or not is_conv1d(module):
        return style
    assert isinstance(style, (ColwiseParallel, RowwiseParallel))
    return transposed(
        input_layouts=style.input_layouts[0],
        output_layouts=style.output_layouts[0],
        use_local_output=style.use_local_output,
    )


def _distributed(
    style: ColwiseParallel | RowwiseParallel, module: nn.Module, mesh: DeviceMesh, placed: Mapping[str, Placement]
) -> nn.Module:
    def partition(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters()):
            cut = distribute_tensor(parameter, mesh, [placed[name]], src_data_rank=style.src_data_rank)
            module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))

    return distribute_module(
        module,
        mesh,
        partition,
        partial(style._prepare_input_fn, style.input_layouts, style.desired_input_layouts),
        partial(style._prepare_output_fn, style.output_layouts, style.use_local_output),
    )
