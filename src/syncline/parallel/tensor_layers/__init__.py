"""Tensor parallelism: layers divided over workers that read the same data. One kind of division per file."""
