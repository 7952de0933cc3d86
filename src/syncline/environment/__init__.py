"""Who and where we are, as torchrun, MPI, Slurm or nobody tells it: one file each."""

from syncline.environment.base import Environment, Rendezvous, hide, restore
from syncline.environment.launchers import detect

__all__ = ["Environment", "Rendezvous", "detect", "hide", "restore"]
