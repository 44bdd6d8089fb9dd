"""The null: how far two correct policies lie apart here, what a log shows beyond it, and the profile of both."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
