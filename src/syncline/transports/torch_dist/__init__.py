"""torch.distributed as a transport: gloo for CPU tensors, NCCL for CUDA tensors where there are any."""

from syncline.transports.torch_dist.transport import TorchConnector, TorchTransport, connect

__all__ = ["TorchConnector", "TorchTransport", "connect"]
