"""The lab: an emulated cluster of hosts on one machine, with links that have a rate."""

from syncline.launch.lab.lab import Lab, LabHost, parse_lab

__all__ = ["Lab", "LabHost", "parse_lab"]
