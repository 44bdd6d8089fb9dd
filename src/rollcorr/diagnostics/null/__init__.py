"""Nulls (the mismatch of two equal policies), the excess of a log over a null, and the profiles of both."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
