"""Checkpoints that are whole or not there, and hold no code."""
