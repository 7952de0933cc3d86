"""The planner: what a training step takes, and what limits it."""
