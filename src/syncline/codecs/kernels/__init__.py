"""The loops of the codecs: plain torch for any device, and numba for the CPU with the same bits."""
