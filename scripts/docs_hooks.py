"""Hooks of mkdocs.yml: the pages that do not lie in docs/, and the links to them.

README.md becomes the home page, and CHANGELOG.md, CONTRIBUTING.md and SECURITY.md pages of their own. A link
from any page to another file of the project (an example, a header) leads to a page that shows the file, so
that the site is whole without a code host.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LANGUAGES = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".sh": "bash", ".json": "json", ".toml": "toml"}
# Code is left as it is; of a link or image the target is replaced.
CODE_OR_LINK = re.compile(
    r"(?P<code>^(?P<fence>`{3,}).*?^(?P=fence)`*\s*$|`[^`\n]+`)"
    r"|(?P<before>\]\()(?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))",
    re.MULTILINE | re.DOTALL,
)


def source_of(page: str) -> str:
    """The file of the project that a page of the site shows."""
    return next((source for source, uri in PAGES.items() if uri == page), posixpath.join("docs", page))


def page_of(source: str) -> str:
    """The page of the site (or the file in it) that shows a file of the project."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return PAGES.get(source) or f"source/{source}.md"


def links(markdown: str, page: str) -> list[tuple[re.Match[str], str]]:
    """The links to files of the project in the text of a page, each with the path of its file."""
    folder = posixpath.dirname(source_of(page))
    return [
        (match, posixpath.normpath(posixpath.join(folder, match["target"])))
        for match in CODE_OR_LINK.finditer(markdown)
        if match["target"]
    ]


def shown_source(source: str) -> str:
    """A page that shows a file."""
    language = LANGUAGES.get(posixpath.splitext(source)[1], "text")
    text = (ROOT / source).read_text(encoding="utf-8").rstrip()
    return f"---\nsearch:\n  exclude: true\n---\n\n# {source}\n\n`````{language}\n{text}\n`````\n"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    shown = set()
    for file in files.documentation_pages():
        for _, source in links(file.content_string, file.src_uri):
            if not source.startswith(("docs/", "..")) and source not in PAGES:
                shown.add(source)
    for source in sorted(shown):
        if not (ROOT / source).is_file():
            raise PluginError(f"a page links to {source}, which is not a file")
        files.append(File.generated(config, page_of(source), content=shown_source(source)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files of the project to the pages that show them."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown
    if here == PAGES["README.md"]:
        page.meta["hide"] = ["navigation"]  # of which there is only this page
    text, end = [], 0
    for match, source in links(markdown, here):
        target = posixpath.relpath(page_of(source), posixpath.dirname(here) or ".")
        text += [markdown[end : match.start()], match["before"], target, match["anchor"] or ""]
        end = match.end()
    return "".join([*text, markdown[end:]])
