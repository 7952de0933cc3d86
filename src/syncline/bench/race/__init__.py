"""The race: compares synchronisation strategies by the time in which they reach a target metric."""
