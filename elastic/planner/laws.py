"""Compute-optimal sizes: how many parameters and tokens a number of FLOPs should buy.

Loss = E + A / N^alpha + B / D^beta with N parameters, D tokens and C = 6 N D FLOPs (Hoffmann et al., arXiv 2203.15556,
approach 3). The constants are those of Besiroglu et al. (arXiv 2404.10102, Table 1), who refitted the published data;
the original fit had not converged. Minimising over N at fixed C gives N = G (C/6)^(beta/(alpha+beta)) with
G = (alpha A / (beta B))^(1/(alpha+beta)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.core.errors import UsageError
from elastic.planner.model_shape import ModelShape

# Centre of the 240 runs behind the fit (0.07 to 16 billion parameters, 5 to 500 billion tokens), in FLOPs: there the
# optimum is known best, and an error of its exponent turns the line about this point.
_CENTRE_FLOPS = 3e20
# 90 % of a normal distribution.
_DEVIATIONS = 1.645


@dataclass(frozen=True)
class LossLaw:
    """`E`, `A`, `B`, exponents, and the standard errors of the exponents."""

    irreducible: float = 1.8172
    parameter_scale: float = 482.01
    token_scale: float = 2085.43
    parameter_exponent: float = 0.3478
    token_exponent: float = 0.3658
    parameter_exponent_error: float = 0.02
    token_exponent_error: float = 0.02

    def loss(self, parameters: float, tokens: float) -> float:
        """Nats per token."""
        excess = self.parameter_scale * math.pow(parameters, -self.parameter_exponent)
        return self.irreducible + excess + self.token_scale * math.pow(tokens, -self.token_exponent)

    def optimal_parameters(self, flops: float) -> float:
        a, b = self.parameter_exponent, self.token_exponent
        scale = (a * self.parameter_scale / (b * self.token_scale)) ** (1 / (a + b))
        return float(scale * (flops / 6) ** self.optimal_exponent)

    @property
    def optimal_exponent(self) -> float:
        """Optimal parameters grow as FLOPs to this power."""
        return self.token_exponent / (self.parameter_exponent + self.token_exponent)

    @property
    def optimal_exponent_error(self) -> float:
        """Standard error, from those of both exponents taken as independent."""
        a, b = self.parameter_exponent, self.token_exponent
        return math.hypot(b * self.parameter_exponent_error, a * self.token_exponent_error) / math.pow(a + b, 2)


BESIROGLU_2024 = LossLaw()


@dataclass(frozen=True)
class Optimum:
    """Compute-optimal parameters and tokens for `flops` = 6 x parameters x tokens.

    `likely`: 90 % interval of the parameters from the error of their exponent alone; the error at the centre of the
    fitted runs is not published. `flat`: parameters whose loss at the same FLOPs is at most `tolerance` nats higher.
    """

    flops: float
    parameters: float
    tokens: float
    loss: float
    likely: tuple[float, float]
    flat: tuple[float, float]
    tolerance: float


def optimum(flops: float, law: LossLaw = BESIROGLU_2024, tolerance: float = 0.01) -> Optimum:
    """The compute-optimal model. Raises UsageError outside 1e17 to 1e30 FLOPs, where nothing was ever measured."""
    if not 1e17 <= flops <= 1e30:
        raise UsageError(f"--flops must lie between 1e17 and 1e30, not {flops:g}")
    best = law.optimal_parameters(flops)
    tokens = flops / 6 / best
    turn = math.exp(_DEVIATIONS * law.optimal_exponent_error * abs(math.log(flops / _CENTRE_FLOPS)))
    limit = law.loss(best, tokens) + tolerance

    def beyond(parameters: float) -> bool:
        return law.loss(parameters, flops / 6 / parameters) > limit

    flat = (_edge(beyond, best, 0.5), _edge(beyond, best, 2.0))
    return Optimum(flops, best, tokens, law.loss(best, tokens), (best / turn, best * turn), flat, tolerance)


def _edge(beyond: Callable[[float], bool], inside: float, factor: float) -> float:
    """Where `beyond` becomes true on the way from `inside` by `factor` steps, by bisection of the logarithm."""
    outside = inside * factor
    while not beyond(outside):
        inside, outside = outside, outside * factor
    for _ in range(50):
        middle = math.sqrt(inside * outside)
        inside, outside = (inside, middle) if beyond(middle) else (middle, outside)
    return inside


def shape_of(parameters: float, sequence: int = 4096, vocabulary: int = 32_000) -> ModelShape:
    """A model of about `parameters`: gated MLP, fused attention, about 102 of width per layer, as Llama 70B has."""
    wide = [*range(512, 4096, 512), *range(4096, 65_536, 1024)]
    made = [_shape(hidden, parameters, sequence, vocabulary) for hidden in wide]
    return min(made, key=lambda model: abs(math.log(model.layers * 102 / model.hidden)))


def _shape(hidden: int, parameters: float, sequence: int, vocabulary: int) -> ModelShape:
    one = ModelShape(
        layers=1, hidden=hidden, heads=hidden // (64 if hidden < 4096 else 128), vocabulary=vocabulary,
        sequence=sequence, feed_forward=math.ceil(hidden * 8 / 3 / 256) * 256, gated=True, biases=False,
        learned_positions=False, tied_embeddings=False, dropout=False, fused_attention=True,
    )  # fmt: skip
    layer = replace(one, layers=2).parameters - one.parameters
    return replace(one, layers=max(1, round((parameters - one.parameters) / layer) + 1))
