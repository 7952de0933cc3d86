"""Elastic averaging: workers that are bound to a centre as if by springs."""

from syncline.strategies.easgd.strategy import EASGD

__all__ = ["EASGD"]
