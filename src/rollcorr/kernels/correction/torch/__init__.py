"""The correction in eager torch, block by block: the fast implementation for every device."""
