"""The rollout log: a versioned schema, and streaming reading, writing and checking of Parquet and JSONL files."""

from rollcorr.rollout_log.batch import RolloutBatch
from rollcorr.rollout_log.column_names import missing_column, parse_column_names
from rollcorr.rollout_log.errors import RolloutLogError
from rollcorr.rollout_log.file_limits import FileLimits
from rollcorr.rollout_log.frameworks import FRAMEWORKS, Dump, Framework
from rollcorr.rollout_log.jsonl import JsonlSource
from rollcorr.rollout_log.parquet import ParquetSource
from rollcorr.rollout_log.pickled import PickledSource
from rollcorr.rollout_log.reader import SHARD_TOKENS, count_rows, log_files, log_shards, read_rollout_log, read_shard
from rollcorr.rollout_log.routing_difference import routing_difference
from rollcorr.rollout_log.schema import COLUMNS, SCHEMA_VERSION, TOKEN_COLUMNS, Column
from rollcorr.rollout_log.source import BatchLimits, LogSource, Shard
from rollcorr.rollout_log.validate import CHECK_COLUMNS, ValidationReport, validate_batch, validate_rollout_log
from rollcorr.rollout_log.writer import RolloutLogWriter, convert_log

__all__ = [
    "CHECK_COLUMNS",
    "COLUMNS",
    "FRAMEWORKS",
    "SCHEMA_VERSION",
    "SHARD_TOKENS",
    "TOKEN_COLUMNS",
    "BatchLimits",
    "Column",
    "Dump",
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
    "log_files",
    "log_shards",
    "missing_column",
    "parse_column_names",
    "read_rollout_log",
    "read_shard",
    "routing_difference",
    "validate_batch",
    "validate_rollout_log",
]
