"""The Monitor, an object in your training loop: metrics, alarms and logs of a run.

run_monitor        `Monitor`: correct, then step
run_writer         the thread that writes to files and trackers
step_totals        what one step adds up on the device, and its exchange between ranks in one transfer
running_judge      the health check step by step, and when an alarm begins and passes
batch_at_hand      the rows behind an alarm, and their first cause
own_null           the null that a Monitor measures itself
capture            the last rollouts on disk, without a Monitor
rollout_sample     which rows the rollout log keeps, and how they are collected
field_names        the names of other frameworks' batches
"""

from rollcorr.monitor.rollout_sample import RolloutSample
from rollcorr.monitor.run_monitor import Monitor

__all__ = ["Monitor", "RolloutSample"]
