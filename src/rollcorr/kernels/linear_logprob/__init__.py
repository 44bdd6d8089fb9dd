"""Log-probs from hidden states and the head's weight, without the (N, V) logits.

`reference` is the specification: all logits at once. `torch` runs on every device that runs torch: it computes the
vocabulary in chunks, or only the kept rows. `triton` does the same on GPUs, with one launch between two products.
"""

from rollcorr.kernels.linear_logprob.linear_dispatch import linear_log_prob

__all__ = ["linear_log_prob"]
