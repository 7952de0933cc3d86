"""Doors for scripts that were written for others."""
