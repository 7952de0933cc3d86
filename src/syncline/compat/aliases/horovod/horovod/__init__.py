"""`horovod` for scripts that import it by this name. The API is that of the version below."""

__version__ = "0.28.1"
