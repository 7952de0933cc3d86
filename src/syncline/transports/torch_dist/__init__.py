"""torch.distributed as a transport: gloo for CPU tensors, NCCL for CUDA tensors where there are any."""

from syncline.transports.torch_dist.connect import connect
from syncline.transports.torch_dist.transport import TorchTransport

__all__ = ["TorchTransport", "connect"]
