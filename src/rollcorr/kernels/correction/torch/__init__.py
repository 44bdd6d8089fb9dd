"""The correction in eager torch, block by block: the fast twin of the reference on every device."""

from rollcorr.kernels.correction.torch.blocks import torch_correction

__all__ = ["torch_correction"]
