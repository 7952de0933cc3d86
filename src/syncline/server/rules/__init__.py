"""What a server does with pushed values: one rule a file, torch's own optimizers, and handlers by their names."""

from syncline.server.rules.adagrad import Adagrad
from syncline.server.rules.adam import Adam
from syncline.server.rules.base import Applier, UpdateRule
from syncline.server.rules.catalog import build_rule, rule_names
from syncline.server.rules.handlers import HandlerRule
from syncline.server.rules.plain import Add, Assign
from syncline.server.rules.sgd import Momentum, Sgd
from syncline.server.rules.torch_rule import TorchRule, rule_of, torch_rule

__all__ = [
    "Adagrad",
    "Adam",
    "Add",
    "Applier",
    "Assign",
    "HandlerRule",
    "Momentum",
    "Sgd",
    "TorchRule",
    "UpdateRule",
    "build_rule",
    "rule_names",
    "rule_of",
    "torch_rule",
]
