"""Sharded, shuffled, resumable reading."""
