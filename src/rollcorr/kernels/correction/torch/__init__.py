"""The correction in eager torch, block by block: the fast twin of the reference on every device."""
