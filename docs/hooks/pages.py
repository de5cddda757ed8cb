"""What MkDocs does for the site beside rendering `docs/`: generated references, and pages from outside `docs/`.

Pages of the repository that stand outside `docs/`, such as README.md, become pages of the site. A link to any other
file of the repository leads to a page that shows the file. So a page has the same relative links in the repository and
on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

import command_pages
import http_page
import python_pages
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

#: Where pages from outside `docs/` stand on the site, by their paths in the repository.
OUTSIDE = {
    "README.md": "tour.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "vulnerabilities.md",
    "CHANGELOG.md": "changelog.md",
    **{
        str(path.relative_to(ROOT)): f"examples/{path.parent.name}.md"
        for path in sorted(ROOT.glob("examples/*/README.md"))
    },
}
_SOURCES = {page: path for path, page in OUTSIDE.items()}

#: How a file is highlighted, by the end of its name.
_LANGUAGES = {".py": "python", ".ipynb": "json", ".json": "json", ".yaml": "yaml", ".sh": "bash", ".toml": "toml"}
#: A link's target, behind the text of the link. Targets with a scheme and anchors of the page are left alone.
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated, and those from outside `docs/`."""
    generated = {**command_pages.pages(), **python_pages.pages(), "reference/http.md": http_page.page()}
    for path, page in OUTSIDE.items():
        generated[page] = (ROOT / path).read_text()
    for path in _linked_files([*generated, *(file.src_uri for file in files.documentation_pages())], generated):
        generated[f"files/{path}.md"] = _shown(path)
    for page, text in generated.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links that leave `docs/` lead to where their targets stand on the site."""
    uri = page.file.src_uri
    if uri.startswith("files/"):
        return markdown
    return _rewritten(markdown, uri)


def _rewritten(markdown: str, page: str) -> str:
    folder = posixpath.dirname(_path_of(page))

    def target(match: re.Match[str]) -> str:
        there = _page_of(posixpath.normpath(posixpath.join(folder, match[1])))
        return posixpath.relpath(there, posixpath.dirname(page)) + (match[2] or "")

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(target, part) for part in parts[::2]]
    return "".join(parts)


def _path_of(page: str) -> str:
    """The path in the repository of a page of the site."""
    return _SOURCES.get(page, f"docs/{page}")


def _page_of(path: str) -> str:
    """The page of the site for a path in the repository."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}.md" if (ROOT / path).is_file() else path


def _linked_files(pages: list[str], generated: dict[str, str]) -> list[str]:
    """The files of the repository that pages link to and that are no pages themselves."""
    found = set()
    for page in pages:
        text = generated[page] if page in generated else (ROOT / _path_of(page)).read_text()
        folder = posixpath.dirname(_path_of(page))
        for part in _FENCE.split(text)[::2]:
            for match in _LINK.finditer(part):
                path = posixpath.normpath(posixpath.join(folder, match[1]))
                if _page_of(path).startswith("files/"):
                    found.add(path)
    return sorted(found)


def _shown(path: str) -> str:
    """A page that shows a file."""
    text = (ROOT / path).read_text().rstrip("\n")
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n````{language}\n{text}\n````\n"
