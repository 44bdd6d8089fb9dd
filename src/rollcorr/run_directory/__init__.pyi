# Reading a run.
from .metrics_file import read_metrics as read_metrics
from .stored_run import Run as Run
from .stored_run import read_run as read_run
