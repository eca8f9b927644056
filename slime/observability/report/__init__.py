"""The report of a run: a picture, a text and a page, made from its run folder while it goes on or after it ended.

`record` reads the folder, `panels` says what is worth a curve, `summary` puts the run in words; `figure` draws the
picture, `page` writes the HTML. Each of them takes what the one before made, so no number is computed twice.
"""

from slime.observability.report.page import Report, write_report
from slime.observability.report.record import report_title
from slime.observability.report.summary import RunSummary, summarize, summary_text

__all__ = ["Report", "RunSummary", "report_title", "summarize", "summary_text", "write_report"]
