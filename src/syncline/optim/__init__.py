"""Learning-rate rules for large batches, warm-up and decay, LARS."""
