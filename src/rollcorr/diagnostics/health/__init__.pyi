from .evidence import Finding as Finding
from .judge import HealthReport as HealthReport
from .judge import health as health
from .judge import healthy_range as healthy_range
