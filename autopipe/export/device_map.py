"""A ``device_map`` as Hugging Face's ``from_pretrained`` takes it: the rank of each module."""

from __future__ import annotations

from autopipe.core.plan import Plan
from autopipe.export.coverage import check_single_use
from autopipe.export.text import comment, quoted
from autopipe.export.trainer import Files, Heading, exporter


@exporter("device-map", target="transformers 5", split_only=True)
def device_map(plan: Plan, heading: Heading) -> Files:
    """``device_map.py``: one assignment."""
    check_single_use(plan, "device-map")
    rows = [f"    {quoted(name)}: {stage.rank},\n" for stage in plan.stages for name in stage.layers]
    return {"device_map.py": f"{comment(heading)}device_map = {{\n{''.join(rows)}}}\n"}
