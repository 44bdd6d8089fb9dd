"""Advice on a mismatch: thresholds from a null, noise at customary limits, and the choice of a preset."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
