"""What others do, to compare with: PyTorch's DistributedDataParallel and its kin, torchft, hivemind."""

from syncline.bench.baselines.base import process_group
from syncline.bench.baselines.catalog import availability, baseline_names, build_baseline, default_baselines, uninvited
from syncline.bench.baselines.ddp import DDP, ddp
from syncline.bench.baselines.hivemind import Hivemind
from syncline.bench.baselines.post_local import PostLocalSGD
from syncline.bench.baselines.torchft import TorchFT

__all__ = [
    "DDP",
    "Hivemind",
    "PostLocalSGD",
    "TorchFT",
    "availability",
    "baseline_names",
    "build_baseline",
    "ddp",
    "default_baselines",
    "process_group",
    "uninvited",
]
