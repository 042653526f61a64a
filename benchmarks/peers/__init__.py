"""Published inputs of other planners, and their objectives."""
