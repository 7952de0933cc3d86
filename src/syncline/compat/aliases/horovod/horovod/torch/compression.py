"""`horovod.torch.compression` for scripts that import it by this name."""

from syncline.compat.horovod.compression import Compression, FP16Compressor, NoneCompressor

__all__ = ["Compression", "FP16Compressor", "NoneCompressor"]
