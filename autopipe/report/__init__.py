"""What a plan, a profile or a check says, for people to read."""
