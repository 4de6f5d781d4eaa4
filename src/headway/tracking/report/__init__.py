"""The report of one run, or of several: a self-contained HTML page, and pictures; torch-free.

::

    runs = load([Path("runs/digits")])
    Path("report.html").write_text(html_page(runs), encoding="utf-8")
"""

from headway.tracking.report.data import load
from headway.tracking.report.page import html_page

__all__ = ["html_page", "load"]
