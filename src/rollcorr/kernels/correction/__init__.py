"""The correction in one pass: log-probs → weights, loss mask, keep flags, statistics.

`reference` is the specification: whole tensors, one formula at a time. `torch` is its fast twin for every device that
runs torch: it walks over blocks that stay in cache. `cpu` is the same in compiled C, at the speed of memory; `triton`
is the same for GPUs, in three launches. `rows` is the list of statistics that all of them leave.
"""

from rollcorr.kernels.correction.dispatch import implementations, warm

__all__ = ["implementations", "warm"]
