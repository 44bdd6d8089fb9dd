"""Rollout correction for reinforcement learning, for any trainer.

    >>> from rollcorr import correct
    >>> correction = correct(train_log_prob, rollout_log_prob, response_mask, "decoupled_token_is")  # doctest: +SKIP

The public names are listed, in groups, in `__init__.pyi`. Each is imported on first use, so that `import rollcorr` and
the command line start without torch.
"""

import lazy_loader as _lazy

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
