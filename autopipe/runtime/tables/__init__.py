"""Action tables on torch's pipeline runtime: its stages and messages, what is relied on, when each action ran."""
