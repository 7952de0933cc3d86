"""The twelve rules, in Hoefler's order, and the one that comes before them.

T. Hoefler, "Twelve ways to fool the masses when reporting performance of deep learning workloads", 2018; after
D. Bailey's twelve ways of 1991.
"""

from __future__ import annotations

from syncline.bench.lint import (
    accuracy,
    clock,
    ending,
    fairness,
    files,
    hardware,
    held_out,
    inputs,
    operations,
    same,
    scaling,
    tuning,
    whole,
)
from syncline.bench.lint.base import Rule

__all__ = ["RECORD", "RULES"]

RECORD = Rule(
    0,
    "Change the record",
    "the folder is as the race wrote it: nothing missing, edited or foreign",
    files.check,
    files.looked,
)
"""No way of its own: without it the others have nothing to look at."""

RULES = (
    Rule(
        1,
        "Ignore accuracy when scaling up",
        "every number of workers has its accuracy, beside that of one worker",
        accuracy.check,
        accuracy.looked,
    ),
    Rule(
        2,
        "Do not report test accuracy",
        "accuracy is on samples that nothing was trained or chosen on; the test split is looked at once",
        held_out.check,
        held_out.looked,
        held_out.check_run,
    ),
    Rule(
        3,
        "Do not count the tuning",
        "every run that a learning rate was chosen with is here, and all entries had as many",
        tuning.check,
        tuning.looked,
    ),
    Rule(
        4,
        "Compare with older hardware",
        "all entries ran on the same machine, with the same software, in the same place",
        hardware.check,
        hardware.looked,
    ),
    Rule(
        5,
        "Show kernels, or the best part of a run",
        "runs are whole, from the first step to the last",
        whole.check,
        whole.looked,
        whole.check_run,
    ),
    Rule(
        6,
        "Leave out I/O",
        "data, evaluation and all else are inside the clock; phases add up to 95 % of it",
        clock.check,
        clock.looked,
        clock.check_run,
    ),
    Rule(
        7,
        "Report the highest number of operations",
        "no operations a second without the type of their operands and the formula that counts them",
        operations.check,
        operations.looked,
        operations.check_run,
    ),
    Rule(
        8,
        "Take speed from one set of options and accuracy from another",
        "both are of one run, with the options that the plan names and one version of the code",
        same.check,
        same.looked,
        same.check_run,
    ),
    Rule(
        9,
        "Train on inputs that suit the machine",
        "samples have the shape, kind and number that the workload gives them",
        inputs.check,
        inputs.looked,
        inputs.check_run,
    ),
    Rule(
        10,
        "Train for just the right time",
        "target and cadence were fixed before the run, and the run went on a little after the hit",
        ending.check,
        ending.looked,
        ending.check_run,
    ),
    Rule(
        11,
        "Choose the batch as it suits",
        "strong or weak scaling is declared, and it is what was done",
        scaling.check,
        scaling.looked,
        scaling.check_run,
    ),
    Rule(
        12,
        "Choose whom to compare with, and which runs",
        "baselines ran here with the same budget and enough seeds, and no run is dropped",
        fairness.check,
        fairness.looked,
    ),
)
