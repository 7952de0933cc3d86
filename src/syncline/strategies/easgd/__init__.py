"""Elastic averaging SGD: each worker's weights and a centre move towards each other."""

from syncline.strategies.easgd.strategy import EASGD

__all__ = ["EASGD"]
