"""Draw the README's picture, docs/timeline.svg, from what ``make demo`` left: a plan and the run that checked it.

make demo && python benchmarks/picture.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

from autopipe.core import files
from autopipe.core.result import CheckResult
from autopipe.report.svg import timeline_svg
from autopipe.simulate import simulate_plan

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", nargs="?", type=Path, default=ROOT / "build" / "demo" / "plan.json")
    plan_path = parser.parse_args().plan
    plan, result = files.load(plan_path), files.read(files.check_path(plan_path), CheckResult)
    title = f"One step of {plan.model.name}, {plan.schedule.name}, predicted and measured"
    picture = timeline_svg(
        simulate_plan(plan), result.timeline, limits=plan.memory_limit_bytes, title=title, key="readme"
    )
    files.write_text(picture, ROOT / "docs" / "timeline.svg")
    print(f"wrote docs/timeline.svg: predicted {plan.predicted.step_s:.4f} s, measured {result.measured.step_s:.4f} s")


if __name__ == "__main__":
    main()
