"""Workloads: data, model and loss, each with train, validation and test splits."""
