"""What a server does with pushed values: one rule a file, torch's own optimizers, and handlers by their names."""

from syncline.server.rules.adagrad import Adagrad
from syncline.server.rules.adam import Adam
from syncline.server.rules.base import Applier, Rule
from syncline.server.rules.catalog import build_rule, rule_names
from syncline.server.rules.handled import Handled
from syncline.server.rules.plain import Add, Assign
from syncline.server.rules.sgd import Momentum, Sgd
from syncline.server.rules.torch_rule import TorchRule, rule_of, torch_rule

__all__ = [
    "Adagrad",
    "Adam",
    "Add",
    "Applier",
    "Assign",
    "Handled",
    "Momentum",
    "Rule",
    "Sgd",
    "TorchRule",
    "build_rule",
    "rule_names",
    "rule_of",
    "torch_rule",
]
