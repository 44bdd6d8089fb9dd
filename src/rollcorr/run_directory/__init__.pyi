# What a run's directory holds.
from .directory import RunDirectory as RunDirectory

# Reading the metrics of a run that goes on.
from .growing_metrics import GrowingMetrics as GrowingMetrics

# Reading a run.
from .metrics_file import BadInputError as BadInputError
from .metrics_file import drop_later_steps as drop_later_steps
from .metrics_file import read_metrics as read_metrics

# One process at a time.
from .run_lock import RunInUseError as RunInUseError
from .run_lock import RunLock as RunLock

# Where the metrics of a step go.
from .sinks import ConsoleProgress as ConsoleProgress
from .sinks import JsonLines as JsonLines
from .sinks import ProgressColumn as ProgressColumn
from .sinks import Sink as Sink
from .sinks import TensorBoard as TensorBoard
from .stored_run import Run as Run
from .stored_run import read_run as read_run

# Trackers with packages of their own, and all sinks of a run.
from .tracker_sinks import NAMED_SINKS as NAMED_SINKS
from .tracker_sinks import Sinks as Sinks
from .tracker_sinks import named_sink as named_sink
from .tracker_sinks import step_line as step_line
