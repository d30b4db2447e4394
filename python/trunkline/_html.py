"""What pages of HTML share: their style, tables and escaping. A page loads nothing from anywhere."""

from __future__ import annotations

import errno
import html
from collections.abc import Sequence
from pathlib import Path

from trunkline._errors import errno_reason, exception_of

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2329 }
body { max-width: 62rem; margin: 2.5rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: 0 } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem }
p.lead { color: #57606a; margin-top: .2rem }
figure { margin: 0 0 1.2rem; overflow-x: auto } figure svg { max-width: 100%; height: auto }
@media (max-width: 40rem) { figure svg { max-width: none; width: 38rem } }
figcaption { color: #57606a; font-size: .87rem }
.pair { display: flex; flex-wrap: wrap; gap: 1.5rem }
.pair > figure { flex: 1 1 26rem; min-width: 0; margin: 0 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { text-align: right; padding: .28rem .7rem; border-bottom: 1px solid #dfe3e8; vertical-align: top }
th { font-weight: 600; white-space: nowrap } th:first-child, td:first-child { text-align: left }
table.facts td, table.facts th { text-align: left }
code { font-size: .85em; overflow-wrap: anywhere }
"""


def escaped(value: object) -> str:
    """Text that HTML shows as it is."""
    return html.escape(str(value))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Return a table of cells that are HTML already."""
    lines = [f'<table class="{kind}">' if kind else "<table>"]
    if header:
        lines.append("<tr>" + "".join(f"<th>{cell}</th>" for cell in header) + "</tr>")
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])


def wide(content: str) -> str:
    """Return a table that is scrolled by itself where the page is narrower."""
    return f'<div class="wide">{content}</div>'


def figure(svg: str, caption: str) -> str:
    """Return a picture with the sentence below it."""
    return f"<figure>{svg}<figcaption>{escaped(caption)}</figcaption></figure>"


def page(title: str, body: Sequence[str]) -> str:
    """Return the whole page; `body`: its parts, as HTML."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escaped(title)}</title><style>{STYLE}</style></head><body>",
        *body,
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def check_page_name(path: str) -> None:
    """Raise ValueError unless a page can have this name."""
    if not path.lower().endswith((".html", ".htm")):
        raise ValueError(f"--report: {path} must end with .html: a report is a page of HTML")


def check_plot_name(path: str) -> None:
    """Raise ValueError unless the name ends as that of a chart or a page."""
    if not path.endswith((".svg", ".html")):
        raise ValueError(f"--plot: {path} must end with .svg (a chart) or .html (a page)")


def check_plot(path: str) -> None:
    """Raise ValueError, before anything is computed, if no plot can be written."""
    check_plot_name(path)
    try:
        check_writable(Path(path))
    except OSError as error:
        why = why_not_writable(error, Path(path))
        raise ValueError(f"--plot: cannot write {path}: {why}") from error


def why_not_writable(error: OSError, path: Path) -> str:
    """Describe an error of check_writable(), with what to do."""
    if error.errno is None:
        return str(error)
    if error.errno == errno.ENOENT:
        return (
            "no such file or directory (ENOENT); a parent directory does not exist: create it (mkdir -p "
            f"{path.parent})"
        )
    return errno_reason(error.errno)


def write_page(text: str, path: Path) -> None:
    """Write a page. Raises OSError that names the file, and says what to do."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        why = why_not_writable(error, path)
        raise exception_of("system", error.errno or 0, f"cannot write {path}: {why}", str(path)) from error


def check_writable(path: Path) -> None:
    """Raise OSError if a page could not be written there; what is there stays as it is."""
    existed = path.exists()
    with path.open("a"):
        pass
    if not existed:
        path.resolve().unlink()  # what was made, also where `path` is a link to it
