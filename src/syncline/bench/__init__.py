"""Measuring side by side: workloads, statistics that do not flatter, tables and pictures of them."""
