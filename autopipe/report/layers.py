"""The profile as a bar chart: what each layer costs at the plan's micro-batch, with the plan's cuts."""

from __future__ import annotations

from autopipe.core.plan import Plan
from autopipe.core.profile import LayerCost, Profile
from autopipe.core.units import format_bytes, format_duration, format_percent
from autopipe.report.markup import bar, legend, said, table


def layer_section(plan: Plan, profile: Profile | None) -> str:
    """A row a layer, or why there is none."""
    if profile is None:
        where = plan.profile.path or "a profile that was never a file"
        return f"<p>The costs of single layers are in {said(where)}, which is not here or has changed since.</p>"
    costs = profile.at(plan.micro_batch)
    longest_s = max(cost.forward_s + cost.backward_s for cost in costs) or 1.0
    again = {name for stage in plan.stages for name in stage.recompute}
    rows = []
    for number, (layer, cost) in enumerate(zip(profile.layers, costs, strict=True)):
        stage = next(stage.index for stage in plan.stages if stage.start <= number < stage.stop)
        name = layer.name + (" (recomputes)" if layer.name in again else "")
        cells = (str(number), name, str(stage), *_numbers(cost, layer.parameter_bytes))
        parts = [("F", cost.forward_s / longest_s), ("B", cost.backward_s / longest_s)]
        rows.append([*map(said, cells[:2]), bar(parts), *map(said, cells[2:])])
    headers = ("layer", "name", "", "stage", "forward", "backward", "spread", "weights", "kept for backward", "output")
    note = f"One micro-batch of {plan.micro_batch} on {profile.device}, {profile.dtype}; a line marks a cut."
    return f'<p class="dim">{said(note)}</p>{legend("FB")}' + table(headers, rows, names=(1,), cut_before=plan.cuts)


def _numbers(cost: LayerCost, weights: int) -> tuple[str, ...]:
    return (
        format_duration(cost.forward_s),
        format_duration(cost.backward_s),
        format_percent(cost.spread),
        format_bytes(weights),
        format_bytes(cost.held_after_forward_bytes),
        format_bytes(cost.output_bytes),
    )
