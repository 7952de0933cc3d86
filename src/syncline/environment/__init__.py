"""Who and where we are, as torchrun, MPI, Slurm or nobody tells it: one file each."""

from syncline.environment.base import Environment, Rendezvous
from syncline.environment.detect import detect
from syncline.environment.hiding import hide, restore

__all__ = ["Environment", "Rendezvous", "detect", "hide", "restore"]
