"""The report of a run (image, text and HTML page), created from the run folder during or after the run.

`record` reads the folder, `panels` selects the curves, `summary` describes the run in words, `figure` draws the plots,
and `page` writes the HTML. Each uses the results of the previous ones, so no number is computed twice.
"""

from slime.observability.report.page import Report, write_report
from slime.observability.report.record import report_title
from slime.observability.report.summary import RunSummary, summarize, summary_text

__all__ = ["Report", "RunSummary", "report_title", "summarize", "summary_text", "write_report"]
