"""Cost model of communication: formulas where they are exact, otherwise the simulated schedule.

`calibrate` measures the network, `predict` predicts the time of a collective, and `Auto` chooses the fastest one.
"""

from syncline.costs.auto import AUTO, AlgorithmChoice, Auto
from syncline.costs.calibration import Calibration, calibrate
from syncline.costs.prediction import CostPrediction, closed_form, predict, predict_fastest, predict_on
from syncline.costs.simulation import Cost, play

__all__ = [
    "AUTO",
    "AlgorithmChoice",
    "Auto",
    "Calibration",
    "Cost",
    "CostPrediction",
    "calibrate",
    "closed_form",
    "play",
    "predict",
    "predict_fastest",
    "predict_on",
]
