from .health_check import Finding as Finding
from .health_check import HealthReport as HealthReport
from .health_check import health as health
from .health_check import healthy_range as healthy_range
