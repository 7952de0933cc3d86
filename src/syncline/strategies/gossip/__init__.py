"""Gossip: workers mix weights with their neighbours on a graph."""

from syncline.strategies.gossip.graphs import GRAPHS, Graph, build_graph, metropolis
from syncline.strategies.gossip.pairwise import PairwiseRun
from syncline.strategies.gossip.strategy import Gossip
from syncline.strategies.gossip.synchronous import GossipRun

__all__ = ["GRAPHS", "Gossip", "GossipRun", "Graph", "PairwiseRun", "build_graph", "metropolis"]
