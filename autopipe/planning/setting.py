"""What a whole search shares: the model and the devices, and what may be asked of them again and again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopipe.baselines import BASELINES
from autopipe.core.cluster import Cluster
from autopipe.core.optimizer import Optimizer
from autopipe.core.profile import Profile, Tie
from autopipe.core.stage import StageCost, stage_cost
from autopipe.planning.seats import Devices, Seats


@dataclass(frozen=True, eq=False)
class Setting:
    """The profile, the cluster, and how they are used: ``limits`` are bytes a rank, ``pins`` stages by layer number.

    ``master_weights`` and ``sharded`` are how the optimizer keeps its state; see core.optimizer. ``order`` lists
    devices as a pipeline passes them, see planning.seats; () is that of the cluster.
    """

    profile: Profile
    cluster: Cluster
    optimizer: str
    limits: tuple[int, ...]
    pins: Mapping[int, int]
    master_weights: bool = False
    sharded: bool = False
    order: tuple[int, ...] = ()
    _seats: dict[tuple[int, int], Seats] = field(default_factory=dict, init=False)
    _rules: dict[int, Mapping[str, tuple[int, ...] | None]] = field(default_factory=dict, init=False)
    _stages: dict[tuple[object, ...], StageCost] = field(default_factory=dict, init=False)

    @cached_property
    def _devices(self) -> Devices:
        return Devices.of(self.cluster, self.limits)

    def speed(self, device: int) -> float:
        """How fast a device is."""
        return float(self._devices.speeds[device])

    @property
    def equal(self) -> bool:
        """Whether all devices are as fast and may use as much."""
        return self._devices.speed is not None and self._devices.limit is not None

    def on_the_same_devices(self, other: Setting) -> bool:
        """Whether pipelines run on the same devices in the same order, whatever these may use."""
        return self.cluster is other.cluster and self.order == other.order

    def keeps_state_as(self, other: Setting) -> bool:
        """Whether the optimizer keeps its state in the same way."""
        ours, theirs = ((s.optimizer, s.master_weights, s.sharded) for s in (self, other))
        return ours == theirs

    def update(self, replicas: int) -> Optimizer:
        """The optimizer of each of so many replicas."""
        return Optimizer(self.optimizer, self.master_weights, replicas if self.sharded else 1)

    def rules(self, parts: int) -> Mapping[str, tuple[int, ...] | None]:
        """The cuts of every baseline into so many stages."""
        if parts not in self._rules:
            self._rules[parts] = {name: rule(self.profile, parts) for name, rule in BASELINES.items()}
        return self._rules[parts]

    def stage_cost(
        self,
        layers: tuple[int, int],
        micro_batch: int,
        replicas: int,
        speed: float,
        recompute: tuple[int, ...],
        shared: tuple[Tie, ...],
    ) -> StageCost:
        """core.stage.stage_cost of a stage that so many replicas run; kept, since many splits have it in common."""
        update = self.update(replicas)
        key = (layers, micro_batch, update.shards, speed, recompute, shared)
        if key not in self._stages:
            self._stages[key] = stage_cost(
                self.profile, *layers, micro_batch, speed=speed, optimizer=update, recompute=recompute, shared=shared
            )
        return self._stages[key]

    def seats(self, depth: int, replicas: int = 1) -> Seats:
        """The devices of a pipeline of ``depth`` ranks, ``replicas`` times."""
        key = depth, replicas
        if key not in self._seats:
            self._seats[key] = Seats(self.cluster, self._devices, depth, replicas, self.order if replicas == 1 else ())
        return self._seats[key]
