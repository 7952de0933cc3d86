"""Rank, size and host of this process, from the variables of torchrun, MPI or Slurm."""

from syncline.environment.base import Environment, Rendezvous, hide, restore
from syncline.environment.launchers import detect

__all__ = ["Environment", "Rendezvous", "detect", "hide", "restore"]
