from .check import DIAGNOSIS as DIAGNOSIS
from .check import CheckResult as CheckResult
from .check import check_logs as check_logs
from .check import choose_config as choose_config
from .log_null import null_of_batch as null_of_batch
from .log_null import null_of_logs as null_of_logs
