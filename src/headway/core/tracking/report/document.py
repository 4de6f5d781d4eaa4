"""Frame of an HTML page: head, style and script around the page's content. The page loads nothing over the network."""

import base64
import hashlib
from html import escape
from importlib.resources import files

from headway.core.tracking.report.line_styles import render_colors


def render_document(title: str, body: str, data: str | None = None) -> str:
    """Return a complete HTML page.

    The content security policy allows only the page's own script and no network requests.

    Args:
        title: Title of the window.
        body: HTML, already escaped.
        data: Data for the script, as JSON in which "<" is escaped; None for a page without a script.
    """
    folder = files("headway.core.tracking.report")
    style = folder.joinpath("style.css").read_text(encoding="utf-8") + render_colors()
    script, allowed_scripts = "", "'none'"
    if data is not None:
        code = folder.joinpath("script.js").read_text(encoding="utf-8")
        allowed_scripts = f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
        script = f'<script type="application/json" id="data">{data}</script>\n<script>{code}</script>\n'
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed_scripts}; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n{script}</body>\n</html>\n"
    )
