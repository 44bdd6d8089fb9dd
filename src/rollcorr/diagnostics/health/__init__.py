"""The health check: healthy ranges of single metrics, and rules over several metrics."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
