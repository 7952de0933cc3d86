"""One-sided asynchronous SGD: receive buffers that others write, and the update that chooses among what it finds."""

from syncline.strategies.onesided.aggregate import aggregate
from syncline.strategies.onesided.core import asgd
from syncline.strategies.onesided.objectives import KMeans, LeastSquares, Logistic, Objective
from syncline.strategies.onesided.solution import Effort, Solution
from syncline.strategies.onesided.strategy import OneSided

__all__ = ["Effort", "KMeans", "LeastSquares", "Logistic", "Objective", "OneSided", "Solution", "aggregate", "asgd"]
