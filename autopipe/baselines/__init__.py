"""What others would choose: rules from a profile and a depth to cuts, each in its own file.

A baseline gives the first layer of every stage but the first, at legal cuts, or None where that many stages cannot
be cut, or the rule does not know such a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopipe.baselines.equal_layers import equal_layers
from autopipe.baselines.equal_parameters import equal_parameters
from autopipe.baselines.gpipe import gpipe
from autopipe.baselines.megatron import megatron
from autopipe.baselines.pipedream import pipedream
from autopipe.baselines.torchtitan import torchtitan
from autopipe.core.profile import Profile

Baseline = Callable[[Profile, int], tuple[int, ...] | None]

BASELINES: Mapping[str, Baseline] = {
    "equal layers": equal_layers,
    "equal parameters": equal_parameters,
    "torchtitan's split": torchtitan,
    "Megatron's split": megatron,
    "GPipe's split": gpipe,
    "PipeDream's split": pipedream,
}
"""By the name that plans list them under."""
