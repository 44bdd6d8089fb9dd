"""What a run leaves behind, written and read: configuration, metrics, events."""

from rollcorr.run_directory.run_logger import RunLogger, drop_later_steps, read_metrics
from rollcorr.run_directory.stored_run import BadInputError, Run, read_run

__all__ = ["BadInputError", "Run", "RunLogger", "drop_later_steps", "read_metrics", "read_run"]
