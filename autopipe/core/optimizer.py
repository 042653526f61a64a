"""How parameters are updated: what the optimizer keeps for them, and what of it each replica has.

With master weights a parameter of 16 bits is the rounded value of a copy in float32, which the optimizer updates with
state in float32. So with Adam its 2 bytes have 2 of gradient and 12 of state: K = 12 of ZeRO (arXiv:1910.02054, section
3.1), whose stage 1 is what replicas do here that share the state out: each updates its equal part of every parameter,
and hands it to the others.

    Optimizer("adamw").state_bytes(layer)                                    # 10⁶ parameters in bfloat16: 4 MB
    Optimizer("adamw", master_weights=True).state_bytes(layer)               # 12 MB
    Optimizer("adamw", master_weights=True, shards=4).state_bytes(layer)     # 3 MB on each of four replicas
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopipe.core.errors import UsageError
from autopipe.core.profile import DTYPE_BYTES, OPTIMIZER_STATE, Layer, LayerCost

MASTER_BYTES = 4
"""An element of a master weight, and of the state that belongs to it: float32."""

PASSES = {"sgd": 3, "momentum": 8, "adam": 18, "adamw": 20}
"""How often torch's optimizers, not fused, read or write a tensor of a parameter's size in a step."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer by its name in OPTIMIZER_STATE; ``shards`` is how many replicas share out its state.

    Raises UsageError for another name.
    """

    name: str
    master_weights: bool = False
    shards: int = 1

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZER_STATE:
            raise UsageError(f"optimizer {self.name!r} is not known: use one of {', '.join(OPTIMIZER_STATE)}")

    @property
    def plain(self) -> bool:
        """Whether it updates whole parameters in their own format, as torch's optimizers do by themselves."""
        return self.shards == 1 and not self.master_weights

    def state_bytes(self, layer: Layer, size: int | None = None) -> int:
        """What one replica keeps for a layer's trained parameters, or for ``size`` bytes of them; rounded up."""
        trained = layer.gradient_bytes if size is None else size
        kept = OPTIMIZER_STATE[self.name] * self._updated_bytes(layer) + MASTER_BYTES * self._copied(layer)
        return -(-trained * kept // (max(layer.parameter_bytes, 1) * self.shards))

    def step_part(self, layer: Layer) -> float:
        """What part of the time of a plain step on the layer's parameters its step takes.

        A step only moves memory: so often what it updates, and with master weights once more the gradient there and
        in float32, the master weight, and the parameter.
        """
        passes, plain = PASSES[self.name], max(layer.parameter_bytes, 1)
        more = (2 + MASTER_BYTES + MASTER_BYTES + 2) * self._copied(layer)
        return (passes * self._updated_bytes(layer) + more) / (passes * plain * self.shards)

    def priced(self, layers: Sequence[Layer], costs: Sequence[LayerCost]) -> Sequence[LayerCost]:
        """The costs of layers, whose ``optimizer_s`` are of plain steps, with those of its own steps."""
        if self.plain:
            return costs
        return [
            replace(cost, optimizer_s=cost.optimizer_s * self.step_part(layer))
            for layer, cost in zip(layers, costs, strict=True)
        ]

    def _updated_bytes(self, layer: Layer) -> int:
        """Bytes of what is updated for all of a layer's parameters: themselves, or their master weights."""
        return layer.parameter_bytes + (MASTER_BYTES - 2) * self._copied(layer)

    def _copied(self, layer: Layer) -> int:
        """How many parameters have a master weight: those of 16 bits, where the others have 32."""
        if not self.master_weights:
            return 0
        return max(0, MASTER_BYTES * layer.parameters - layer.parameter_bytes) // (MASTER_BYTES - 2)


def optimizer_of(optimizer: str | Optimizer) -> Optimizer:
    """The optimizer of a name, or as it is."""
    return Optimizer(optimizer) if isinstance(optimizer, str) else optimizer


def has_masters(dtype: str) -> bool:
    """Whether parameters of a dtype, by its name, are shorter than master weights are."""
    return DTYPE_BYTES.get(dtype, MASTER_BYTES) < MASTER_BYTES
