"""autopipe: plan, run and check pipeline parallelism for an unmodified PyTorch model.

    profile = autopipe.profile("model.py")
    plan = autopipe.plan(profile, cluster, global_batch=16)
    print(plan)
    autopipe.check(plan)

The names below load on first use, so that ``import autopipe`` costs nothing and never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "profile": "autopipe.runtime.measuring.profiling",
    "plan": "autopipe.search",
    "check": "autopipe.runtime.checking.plans",
    "tune": "autopipe.tuning",
    "load": "autopipe.core.files",
    "without_weights": "autopipe.runtime.stages.initial",
    "Profile": "autopipe.core.profile",
    "Cluster": "autopipe.core.cluster",
    "Plan": "autopipe.core.plan",
    "Timeline": "autopipe.core.timeline",
}

__all__ = ["Cluster", "Plan", "Profile", "Timeline", "check", "load", "plan", "profile", "tune", "without_weights"]

if TYPE_CHECKING:
    from autopipe.core.cluster import Cluster
    from autopipe.core.files import load
    from autopipe.core.plan import Plan
    from autopipe.core.profile import Profile
    from autopipe.core.timeline import Timeline
    from autopipe.runtime.checking.plans import check
    from autopipe.runtime.measuring.profiling import profile
    from autopipe.runtime.stages.initial import without_weights
    from autopipe.search import plan
    from autopipe.tuning import tune


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopipe' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
