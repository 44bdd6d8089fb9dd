from .check import DIAGNOSIS as DIAGNOSIS
from .check import CheckResult as CheckResult
from .check import check_logs as check_logs
from .check import choose_config as choose_config
