"""The null: the mismatch of two correct sides, a log's excess over it, and the profiles of null and log."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
