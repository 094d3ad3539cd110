"""A page as plain data: a title, statements, sections and a footer; written as HTML or as Markdown.

Only `page.html.j2` and `style.css` decide the look of a page. The HTML is one file that loads no
script, font or picture from anywhere. Shapes and labels carry meaning, colors do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from ddp_vllm.errors import printable

REPORT_FILE = "report.html"
HTML = '<!doctype html>\n<html lang="en"><head><meta name="generator" content="ddp-vllm">'
MARKDOWN = "<!-- ddp-vllm -->\n"
"""How the files that hold a page begin."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Headings and rows of cells; the first column is text."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    is_text: bool = False
    """Whether every column is text."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing inside the page."""

    name: str
    title: str
    caption: str
    svg: str
    """An SVG element that we drew, which is not escaped."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table or pictures, under a heading if there is one."""

    heading: str
    table: Table | None = None
    pictures: Sequence[Picture] = ()
    remark: str = ""
    folded: bool = False
    """Whether it is hidden until the reader opens it."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Everything on a page, top to bottom."""

    title: str
    lead: Sequence[tuple[str, str]]
    """(topic, statement)."""
    sections: Sequence[Section]
    footer: Sequence[str]
    """How and where the numbers were measured, and notes on missing ones."""


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("ddp_vllm.pages", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["unescaped"] = Markup
    return environment.get_template("page.html.j2")


def to_html(page: Page) -> str:
    """Return the whole page as one self-contained file."""
    return _template().render(page=page)


def to_markdown(page: Page) -> str:
    """Return the sentences and tables of a page in Markdown; pictures are left out."""
    parts = ["\n".join(f"- **{name}**: {_cell(text)}" for name, text in page.lead)]
    for section in page.sections:
        if section.table:
            parts += [f"### {section.heading}", markdown_table(section.table), section.remark]
    parts.append("\n".join(f"- {line}" for line in page.footer))
    return "\n\n".join(filter(None, parts)) + "\n"


def markdown_table(table: Table) -> str:
    """Return the lines of a table in Markdown, columns of numbers to the right."""
    rule = "|".join("---" if table.is_text or not column else "--:" for column in range(len(table.headings)))
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in (table.headings, *table.rows)]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def _cell(value: Any) -> str:
    """Return a value as text that cannot add columns, lines or tags to the table."""
    text = printable(" ".join(str(value).split()))
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
