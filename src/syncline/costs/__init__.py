"""What communication costs: formulas where they are exact, the schedule itself played on a network where not.

`calibrate` measures the network that is there, `predict` asks formula or player, and `Auto` chooses by both.
"""

from syncline.costs.auto import AUTO, Auto, Choice
from syncline.costs.calibration import Calibration, calibrate
from syncline.costs.closed_forms import closed_form
from syncline.costs.player import Cost, play
from syncline.costs.prediction import Prediction, predict, predict_on

__all__ = [
    "AUTO",
    "Auto",
    "Calibration",
    "Choice",
    "Cost",
    "Prediction",
    "calibrate",
    "closed_form",
    "play",
    "predict",
    "predict_on",
]
