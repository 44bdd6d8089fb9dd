"""The correction in one pass: log-probs → weights, loss mask, keep flags, statistics.

`reference` is the specification: complete tensors, one formula at a time. `torch` is the fast implementation for every
device that runs torch: it processes blocks that stay in cache. `cpu` is compiled C at memory bandwidth, and `triton`
runs on GPUs in three launches. `rows` contains the list of statistics that all of them return.
"""

from rollcorr.kernels.correction.dispatch import implementations, warm

__all__ = ["implementations", "warm"]
