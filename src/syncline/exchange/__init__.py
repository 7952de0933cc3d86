"""Buckets, overlap, and how a bucket is reduced; the one place codec meets collective."""

from syncline.exchange.agreement import check_same, share_tree, spread
from syncline.exchange.exchange import Exchange
from syncline.exchange.gradients import Gradients, plain_name
from syncline.exchange.layout import BUCKET_BYTES
from syncline.exchange.rounds import Round
from syncline.exchange.stats import Stats, as_table
from syncline.exchange.ways import WAYS, check_wire

__all__ = [
    "BUCKET_BYTES",
    "WAYS",
    "Exchange",
    "Gradients",
    "Round",
    "Stats",
    "as_table",
    "check_same",
    "check_wire",
    "plain_name",
    "share_tree",
    "spread",
]
