"""Diagnose a mismatch: find its cause and the fix.

Contains the health check, the check of logs, provenance and the report. Names are imported on first use; `__init__.pyi`
lists them.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
