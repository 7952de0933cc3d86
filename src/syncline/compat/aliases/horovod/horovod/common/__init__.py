"""`horovod.common` for scripts that import from it."""
