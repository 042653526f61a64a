"""Ways to order actions that schedules and synthesis share: list scheduling, its rules, building blocks."""
