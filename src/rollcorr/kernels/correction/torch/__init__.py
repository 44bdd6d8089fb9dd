"""The correction in eager torch, block by block: the fast twin of the reference on every device."""

from rollcorr.kernels.correction.torch.blocks import blocked_correction

__all__ = ["blocked_correction"]
