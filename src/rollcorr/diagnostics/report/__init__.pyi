from .console import show_health as show_health
from .console import to_json as to_json
from .html_page import ReportData as ReportData
from .html_page import check_report as check_report
from .html_page import run_report as run_report
from .html_page import write_report as write_report
