"""A pytest plugin for verl-omni's tests of its rollout correction: import its modules without its engine.

The `__init__` of these packages imports vLLM-Omni and every trainer, and may write into site-packages; the modules
under test need none of it. ROLLCORR_OMNI is the folder with verl-omni's tests.
"""

import os
import sys
import types
from pathlib import Path

ROOT = Path(os.environ["ROLLCORR_OMNI"]).parent

for name in ("", ".trainer", ".trainer.omni", ".trainer.diffusion", ".workers"):
    package = types.ModuleType(f"verl_omni{name}")
    package.__path__ = [str(ROOT.joinpath(*package.__name__.split(".")))]
    sys.modules[package.__name__] = package
