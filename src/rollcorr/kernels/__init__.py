"""Fast implementations of `core`: the correction in one pass, and log-probs without the logits.

Names are imported on first use; `__init__.pyi` lists them.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
