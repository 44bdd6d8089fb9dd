"""Write and read run directories: configuration, metrics, checkpoints, events.

    directory      the paths of a run directory
    run_lock       the lock that admits one process at a time
    sinks          outputs for step metrics: metrics.jsonl, TensorBoard, the console, your own
    metrics_file   read metrics.jsonl, also while a run writes it; drop steps that a resumed run computes again
    stored_run     read a run

    tracker_sinks      sinks of Weights & Biases, MLflow, Trackio, and the standard output; `Sinks` guards them all

Names are imported on first use; `__init__.pyi` lists them.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
