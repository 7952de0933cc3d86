"""Solvers for objectives that are not neural networks: one-sided asynchronous SGD, and aggregation as its baseline."""

from syncline.solvers.aggregate import aggregate
from syncline.solvers.asgd import asgd
from syncline.solvers.base import Effort, Objective, Solution
from syncline.solvers.objectives import KMeans, LeastSquares, Logistic

__all__ = ["Effort", "KMeans", "LeastSquares", "Logistic", "Objective", "Solution", "aggregate", "asgd"]
