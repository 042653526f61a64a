"""Plain torch: one script that needs nothing but torch and the model's file, and torch's CSV of the table.

The script prunes the model in place, so it cuts only where the next stage begins with a block, or with what follows
the blocks, and where one tensor crosses: the first argument of that layer. Everything else is the graph builder's.
"""

from __future__ import annotations

from importlib import resources
from string import Template

from autopipe.core.errors import CannotExport
from autopipe.core.plan import Plan
from autopipe.export.coverage import check_single_use
from autopipe.export.names import is_block
from autopipe.export.shares import share_functions
from autopipe.export.text import in_docstring, literal, quoted, schedule_csv
from autopipe.export.trainer import Files, Heading, exporter

_FILE = "train_pipeline.py"
_OPTIMIZERS = {
    "sgd": "torch.optim.SGD",
    "momentum": "lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9)",
    "adam": "torch.optim.Adam",
    "adamw": "torch.optim.AdamW",
}


@exporter("torch", target="torch 2.13", recomputes_each=True)
def torch_script(plan: Plan, heading: Heading) -> Files:
    """``train_pipeline.py`` and ``schedule.csv``. Raises CannotExport where a cut needs the graph builder."""
    check_single_use(plan, "torch")
    _check_boundaries(plan)
    again = [name for stage in plan.stages for name in stage.recompute]
    text = Template(resources.files(__package__).joinpath(f"{_FILE}.txt").read_text(encoding="utf-8")).substitute(
        heading="\n".join(map(in_docstring, heading)),
        file=_FILE,
        processes=plan.depth * plan.replicas,
        model=f"HERE / {quoted(plan.model.path)}" if plan.model.path else "None  # give --model FILE",
        builder=quoted(plan.model.builder),
        digest=quoted(plan.model.digest) if plan.model.digest else "None",
        micro_batch=plan.micro_batch,
        micro_batches=plan.micro_batches,
        ranks=plan.depth,
        replicas=plan.replicas,
        placement=list(plan.schedule.placement),
        stages=literal([stage.layers for stage in plan.stages], "    "),
        boundaries=", ".join(_boundary(plan, stage) for stage in range(len(plan.stages) - 1)),
        recompute=f"{{{', '.join(map(quoted, again))}}}" if again else "set()",
        optimizer=_OPTIMIZERS[plan.optimizer],
        shares=share_functions(plan.reduction).rstrip(),
    )
    return {_FILE: text, "schedule.csv": schedule_csv(plan)}


def _boundary(plan: Plan, stage: int) -> str:
    (edge,) = plan.stages[stage].sends
    return f"({edge.sizes(plan.micro_batch)}, torch.{edge.dtype})"


def _check_boundaries(plan: Plan) -> None:
    layers = [name for stage in plan.stages for name in stage.layers]
    first_block = next((index for index, name in enumerate(layers) if is_block(name)), len(layers))
    for stage, following in zip(plan.stages, plan.stages[1:], strict=False):
        where = f"the cut before {following.layers[0]!r}"
        if following.start < first_block:
            raise CannotExport(f"torch: {where} lies before the first block: only autopipe's own stages cut there")
        if len(stage.sends) != 1:
            names = ", ".join(edge.name for edge in stage.sends)
            raise CannotExport(
                f"torch: {len(stage.sends)} values cross {where} ({names}), one can: use autopipe's own stages"
            )
        (edge,) = stage.sends
        if edge.consumers[0] != following.start or edge.producer != following.start - 1:
            raise CannotExport(f"torch: {edge.name!r} is relayed over {where}: use autopipe's own stages")
        if not edge.needs_gradient:
            raise CannotExport(f"torch: {edge.name!r} crosses {where} without a gradient: use autopipe's own stages")
