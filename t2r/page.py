"""Pages as one HTML file that loads nothing from elsewhere: style, tables, figures."""

import html
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from t2r.console import short
from t2r.files import atomic_file
from t2r.plots import styled

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
table { display: block; overflow-x: auto; } /* one that is wider than the window scrolls, not the page */
th, td { padding: .3rem .7rem; border-bottom: 1px solid #8884; text-align: right; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; background: white; border-radius: 6px; padding: .5rem; }
figure svg { display: block; max-width: 100%; height: auto; margin: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 14rem; overflow: auto; }
pre { background: #8881; padding: .8rem; border-radius: 6px; }
small { opacity: .75; }
h3 small { font-weight: normal; }
blockquote { margin: 0; padding: .8rem 1rem; background: #8881; border-radius: 6px; }
section { border: 1px solid #8884; border-radius: 6px; padding: 0 1rem; margin: .5rem 0; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: 0 1rem; }
.beside > * { min-width: 0; } /* a wide table scrolls within its column */
@media (prefers-color-scheme: dark) {
  figure { background: none; padding: 0; }
  figure svg { filter: invert(.9) hue-rotate(180deg); border-radius: 6px; } /* dark, and the colours stay */
}
"""


def write_page(path: Path, title: str, parts: Iterable[str]) -> None:
    """Writes a page of these parts, which are HTML, under a title, which is plain text."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
    body = "\n".join([f"<h1>{html.escape(title)}</h1>", *parts])
    with atomic_file(path) as unfinished:
        unfinished.write_text(f'<!doctype html><html lang="en">{head}{body}</html>\n', "utf-8")


def table(headers: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """An HTML table of plain values; numbers are shortened, None is an empty cell."""
    head = "".join(f"<th>{html.escape(header)}</th>" for header in headers)
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    return "" if value is None else html.escape(short(value))


def figure_svg(figure: Figure) -> str:
    """A figure as SVG, for use within a page."""
    styled(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def describe(environment: dict[str, Any]) -> str:
    """The machine and the versions as a sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    device, processor, python = (environment[name] for name in ("device", "processor", "python"))
    return f"{device} ({processor}), with Python {python}, {versions}"
