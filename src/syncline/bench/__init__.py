"""Benchmarks, races, their reports and lint, and the live page. Baselines of other libraries to compare with."""
