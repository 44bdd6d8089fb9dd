from .verdict import Finding as Finding
from .verdict import HealthReport as HealthReport
from .verdict import health as health
from .verdict import healthy_range as healthy_range
