"""The rollout log: a versioned schema, and streaming reading, writing and checking of Parquet and JSONL files."""

from rollcorr.rollout_log.batch import RolloutBatch
from rollcorr.rollout_log.build import routing_difference
from rollcorr.rollout_log.errors import FileLimits, RolloutLogError
from rollcorr.rollout_log.framework_form import Framework
from rollcorr.rollout_log.frameworks import FRAMEWORKS
from rollcorr.rollout_log.jsonl import JsonlSource
from rollcorr.rollout_log.parquet import ParquetSource
from rollcorr.rollout_log.pickled import PickledSource
from rollcorr.rollout_log.reader import count_rows, log_shards, read_rollout_log, read_shard
from rollcorr.rollout_log.schema import COLUMNS
from rollcorr.rollout_log.source import BatchLimits, LogSource, Shard
from rollcorr.rollout_log.validate import ValidationReport, validate_rollout_log
from rollcorr.rollout_log.writer import RolloutLogWriter, convert_log

__all__ = [
    "COLUMNS",
    "FRAMEWORKS",
    "BatchLimits",
    "FileLimits",
    "Framework",
    "JsonlSource",
    "LogSource",
    "ParquetSource",
    "PickledSource",
    "RolloutBatch",
    "RolloutLogError",
    "RolloutLogWriter",
    "Shard",
    "ValidationReport",
    "convert_log",
    "count_rows",
    "log_shards",
    "read_rollout_log",
    "read_shard",
    "routing_difference",
    "validate_rollout_log",
]
