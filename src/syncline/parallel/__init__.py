"""Model parallelism: a model is split over workers."""
