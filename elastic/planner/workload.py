"""What one rank must compute and send in a step: counts that follow from model, mesh and strategy, without any time.

FLOPs are those of Narayanan et al. (arXiv 2104.04473, eq. 3) for a GPT; collectives per layer are Megatron's for tp,
DeepSpeed-Ulysses' for sp (arXiv 2309.14509). Those of dp are what DeepSpeed 0.19.8 sends with its defaults: stage 1
all-reduces gradients and gathers weights, which is more than the ZeRO paper counts; stage 2 does so per micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.planner.activations import layer_activations
from elastic.planner.model_shape import ModelShape, stage_layers
from elastic.planner.states import BF16_ADAM, Dtypes, partition_elements, whole_elements
from elastic.planner.strategy import Mesh, Strategy

# Bytes that the optimizer reads and writes per element: fp32 master and two moments both ways, gradient, weight.
_OPTIMIZER_BYTES = 28
# Bytes of one logit that the loss reads and writes: softmax in fp32, its gradient, the two-byte copies.
_LOSS_BYTES = 20


@dataclass(frozen=True)
class Collective:
    """`count` operations of `size_bytes` each (the whole tensor), under the keys of the collective ledger."""

    operation: str
    axis: str
    size_bytes: float
    count: float = 1.0


@dataclass(frozen=True)
class Workload:
    """Of one rank of the stage that sets the pace. "Per pass" means per micro-batch."""

    mesh: Mesh
    micro_steps: int
    virtual_stages: int
    # Layers of a stage, and of the last stage, which also computes the logits.
    layers: int
    last_layers: int
    # Of one layer and pass: forward, backward and recomputation together.
    flops: float
    fused_attention_flops: float
    traffic_bytes: float
    kernel_passes: float
    layer_collectives: tuple[Collective, ...]
    head_flops: float
    head_bytes: float
    # One boundary message each way.
    send_bytes: float
    pass_collectives: tuple[Collective, ...]
    step_collectives: tuple[Collective, ...]
    overlaps: bool
    optimizer_bytes: float
    host_link_bytes: float
    host_optimizer_bytes: float
    # FLOPs of the whole step on all ranks that the model itself needs, without recomputation.
    model_flops: float


def workload(model: ModelShape, strategy: Strategy, mesh: Mesh, dtypes: Dtypes = BF16_ADAM) -> Workload:
    layers = stage_layers(model.layers, mesh.pp)
    tokens = strategy.micro_batch * model.sequence / mesh.sp
    matrices = 2 * tokens * model.matrix_parameters_per_layer / mesh.tp
    attention = 4 * tokens * model.sequence * model.hidden / mesh.tp * (0.5 if model.fused_attention else 1)
    head = 2 * tokens * model.hidden * model.vocabulary / mesh.tp
    again = strategy.recompute == "full"
    again_attention = strategy.recompute != "none"
    layer = layer_activations(model, strategy, mesh)
    partition, whole = _partition(model, strategy, mesh)
    off = strategy.offload != "none"
    return Workload(
        mesh=mesh,
        micro_steps=strategy.micro_steps(mesh),
        virtual_stages=strategy.virtual_stages,
        layers=layers[0],
        last_layers=layers[-1],
        flops=matrices * (4 if again else 3)
        + (0 if model.fused_attention else attention * (4 if again_attention else 3)),
        # FlashAttention recomputes scores in its backward pass: 2.5 times the forward FLOPs instead of 2.
        fused_attention_flops=attention * (4.5 if again else 3.5) if model.fused_attention else 0.0,
        traffic_bytes=layer.all * (4 if again else 3)
        + (layer.attention_matrix if strategy.recompute == "selective" else 0),
        kernel_passes=4 if again else 3,
        layer_collectives=_layer_collectives(model, strategy, mesh, tokens),
        head_flops=3 * head,
        head_bytes=tokens * model.vocabulary / mesh.tp * _LOSS_BYTES,
        send_bytes=2 * tokens * model.hidden / (mesh.tp if strategy.scatter_gather else 1) if mesh.pp > 1 else 0.0,
        pass_collectives=_pass_collectives(strategy, mesh, whole, layers[0], dtypes),
        step_collectives=_step_collectives(strategy, mesh, whole, dtypes),
        overlaps=strategy.overlaps,
        optimizer_bytes=0.0 if off else partition * float(_OPTIMIZER_BYTES),
        host_link_bytes=_host_link(strategy, partition, dtypes),
        host_optimizer_bytes=partition * float(_OPTIMIZER_BYTES) if off else 0.0,
        model_flops=strategy.global_batch * _model_flops(model),
    )


def _model_flops(model: ModelShape) -> float:
    """Of one sample, forward and backward. The causal half of attention is counted as the papers do: in full."""
    per_token = model.matrix_parameters_per_layer + 2 * model.sequence * model.hidden
    return 6.0 * model.sequence * (model.layers * per_token + model.hidden * model.vocabulary)


def _partition(model: ModelShape, strategy: Strategy, mesh: Mesh) -> tuple[int, int]:
    """(elements this rank updates, elements it holds or gathers), of the first stage."""
    tensors = model.stage_tensors(mesh.tp, mesh.pp, mesh.ep, 0, stage_layers(model.layers, mesh.pp)[0])
    dense, experts = [t for t in tensors if not t.expert], [t for t in tensors if t.expert]
    mine = partition_elements(dense, strategy.zero_stage, mesh.data_size)
    mine += partition_elements(experts, strategy.zero_stage, mesh.data_size // mesh.ep)
    return mine, whole_elements(tensors)


def _layer_collectives(model: ModelShape, strategy: Strategy, mesh: Mesh, tokens: float) -> tuple[Collective, ...]:
    found: list[Collective] = []
    passes = 3 if strategy.recompute == "full" else 2
    size = 2 * tokens * model.hidden
    if mesh.tp > 1 and strategy.sequence_parallel:
        # Two pairs per pass. Gathering the inputs once more in the backward pass overlaps the weights' gradients.
        found += [Collective(name, "tp", size, 2 * passes) for name in ("all_gather", "reduce_scatter")]
    elif mesh.tp > 1:
        found.append(Collective("all_reduce", "tp", size, 2 * passes))
    if mesh.sp > 1:
        kv = model.kv_heads / model.heads
        found += [Collective("all_to_all", "sp", size / mesh.tp * width, 2 * passes) for width in (1.0, kv)]
    if mesh.ep > 1:
        found.append(Collective("all_to_all", "ep", size * model.experts_per_token, 2 * passes))
    return tuple(found)


def _pass_collectives(
    strategy: Strategy, mesh: Mesh, whole: int, layers: int, dtypes: Dtypes
) -> tuple[Collective, ...]:
    """Per micro-batch, of all layers: stage 3 gathers weights for each pass and scatters gradients."""
    if mesh.data_size == 1:
        return ()
    if strategy.zero_stage == 2:
        return (Collective("all_reduce", "dp", float(whole * dtypes.gradients)),)
    if strategy.zero_stage == 3:
        # Prefetching joins parameters; one operation per layer is what is left of them.
        size = whole / layers
        return (
            Collective("all_gather", "dp", size * dtypes.weights, 2.0 * layers),
            Collective("reduce_scatter", "dp", size * dtypes.gradients, float(layers)),
        )
    return ()


def _step_collectives(strategy: Strategy, mesh: Mesh, whole: int, dtypes: Dtypes) -> tuple[Collective, ...]:
    if mesh.data_size == 1 or strategy.zero_stage == 3:
        return ()
    reduced = Collective("all_reduce", "dp", float(whole * dtypes.gradients))
    gathered = Collective("all_gather", "dp", float(whole * dtypes.weights))
    return {0: (reduced,), 1: (reduced, gathered), 2: (gathered,)}[strategy.zero_stage]


def _host_link(strategy: Strategy, partition: int, dtypes: Dtypes) -> float:
    """Bytes over the host link per step: gradients down and weights up, and with parameters offloaded each pass."""
    if strategy.offload == "none":
        return 0.0
    step = partition * (dtypes.gradients + dtypes.weights)
    return float(step + (2 * partition * dtypes.weights if strategy.offload == "parameters" else 0))
