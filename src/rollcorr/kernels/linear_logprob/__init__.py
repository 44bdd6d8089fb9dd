"""Log-probs from hidden states and the head's weight, without the (N, V) logits.

`reference` is the specification: all logits at once. `torch` is its twin for every device that runs torch: the
vocabulary in chunks, or the kept rows alone. `triton` is the same for GPUs, with one launch between two products.
"""

from rollcorr.kernels.linear_logprob.linear_dispatch import linear_log_prob

__all__ = ["linear_log_prob"]
