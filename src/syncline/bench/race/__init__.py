"""The race: which way of agreeing reaches the target first, here, and why."""
