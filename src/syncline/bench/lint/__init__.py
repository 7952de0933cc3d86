"""The lint of a race: checks the raw logs for twelve reporting mistakes."""

from syncline.bench.lint.base import Finding, Rule, Verdict
from syncline.bench.lint.catalog import RECORD, RULES
from syncline.bench.lint.review import lint, review, review_run

__all__ = ["RECORD", "RULES", "Finding", "Rule", "Verdict", "lint", "review", "review_run"]
