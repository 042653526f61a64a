"""Whether a plan's stages hold each layer exactly once: a file can be edited, and trainers drop names in silence."""

from __future__ import annotations

from collections import Counter

from autopipe.core.errors import CannotExport
from autopipe.core.plan import Plan
from autopipe.core.units import many


def check_coverage(plan: Plan) -> None:
    """Raise CannotExport for a layer that is forgotten, doubled or misspelt; a Plan has no empty stage."""
    names = [name for stage in plan.stages for name in stage.layers]
    for name, count in Counter(names).items():
        if count > 1:
            raise CannotExport(f"layer {name!r} is there {count} times, once is right: plan again")
    for stage in plan.stages:
        if len(stage.layers) != stage.stop - stage.start:
            raise CannotExport(
                f"stage {stage.index} is layers {stage.start} to {stage.stop - 1}, {stage.stop - stage.start} of them, "
                f"but names {len(stage.layers)}: a layer is forgotten or too many. Plan again"
            )
        unknown = [name for name in stage.layers if stage.modules and module_of(name) not in stage.modules]
        if unknown:
            raise CannotExport(f"stage {stage.index} has no module {unknown[0]!r}: is its layer misspelt? Plan again")


def check_pipeline(plan: Plan, trainer: str) -> None:
    """Raise CannotExport for a plan of one stage, which a trainer runs without any plan: by its batch sizes alone."""
    if len(plan.stages) == 1:
        batches = f"{many(plan.micro_batches, 'micro-batch')} of {plan.micro_batch}"
        raise CannotExport(
            f"{trainer}: the plan has one stage, there is no pipeline to export. Train the model as it is, on "
            f"{many(plan.replicas, 'device')}, with {batches} on each"
        )


def module_of(layer: str) -> str:
    """The module path of a layer: a module that runs again has ``@1`` behind its name."""
    return layer.partition("@")[0]


def check_single_use(plan: Plan, trainer: str) -> None:
    """Raise CannotExport for a module that runs more than once: it has no one stage."""
    for stage in plan.stages:
        for layer in stage.layers:
            if module_of(layer) != layer:
                raise CannotExport(f"{trainer}: module {module_of(layer)!r} runs more than once ({layer!r})")
