"""Simulations: small policies with a known mismatch, their exact gradient, and the effect of each correction on it.

    markov_policies      policies as tables, rewards, and exact expectations by dynamic programming
    mismatches           pairs of trainer and rollout policy, by kind and severity or at a given KL
    sequence_rows        sequences as rows: sampled, or every one with its exact probability
    gradient_errors      bias, variance, MSE and ESS of an estimator, and its matched random rejection
    orders               fitted slopes, the growth of χ², the longest viable length
    studies, study_run   the cells of the built-in study, and a resumable runner for cells
    simulation_file      a user's own study in YAML

Names are imported on first use; `__init__.pyi` lists them.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
