"""The frame of a page: one HTML file that holds its style, script and data, and asks nothing of any network."""

import base64
import hashlib
from html import escape
from importlib.resources import files

from headway.tracking.report import looks


def document(title: str, body: str, data: str | None = None) -> str:
    """A whole page.

    The content security policy lets only the page's own script run and nothing be fetched.

    Args:
        title: of the window.
        body: HTML, escaped already.
        data: what the script draws from, as JSON that cannot end its element; None: the page has no script.
    """
    style = files("headway.tracking.report").joinpath("style.css").read_text(encoding="utf-8") + looks.css()
    script, allowed = "", "'none'"
    if data is not None:
        code = files("headway.tracking.report").joinpath("script.js").read_text(encoding="utf-8")
        allowed = f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
        script = f'<script type="application/json" id="data">{data}</script>\n<script>{code}</script>\n'
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n{script}</body>\n</html>\n"
    )
