"""Reports on one or more runs, as a self-contained HTML page or as PNG files. Does not import torch.

Example::

    runs = load([Path("runs/digits")])
    Path("report.html").write_text(html_page(runs), encoding="utf-8")
"""

from headway.core.tracking.report.data import load
from headway.core.tracking.report.page import html_page

__all__ = ["html_page", "load"]
