"""What a run leaves behind, written and read: configuration, metrics, checkpoints, events.

    directory      the names of everything in a run's directory
    run_lock       one process at a time
    sinks          where the metrics of a step go: metrics.jsonl, TensorBoard, the console, your own
    metrics_file   reading metrics.jsonl, also while a run writes it; forgetting steps that a resumed run computes again
    stored_run     reading a run

    tracker_sinks      sinks of Weights & Biases, MLflow, Trackio, and the standard output; `Sinks` guards them all

Names are imported on first use; `__init__.pyi` lists them.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
