"""The processes of a run: how they start and end, what they run on, what they agree on and sum."""
