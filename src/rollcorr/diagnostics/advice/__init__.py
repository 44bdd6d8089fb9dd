"""What to do about a mismatch: thresholds from a null, what noise does to customary limits, which preset to take."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
