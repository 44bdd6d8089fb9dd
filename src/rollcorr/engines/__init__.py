"""Samplers with one common protocol: transformers, CTranslate2, vLLM and SGLang.

Names are imported on first use, because each engine needs a separate package; `__init__.pyi` lists them.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
