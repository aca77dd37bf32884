"""MkDocs hook: files of the repository that pages link to become part of the site, and links to them follow.

Pages link as they do on a code host, relative to their own place (`../../benchmarks/results/kernels/decode.json`).
On the site such a file lies under `repository/`.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "repository/"
LINK = re.compile(r"(!?\[(?:[^\]]*)\])\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")
# Pages that no page of docs/ links to.
ALWAYS = ("CHANGELOG.md",)


def _place(src_uri: str) -> str:
    """Path in the repository of a page of the site."""
    return src_uri.removeprefix(PREFIX) if src_uri.startswith(PREFIX) else f"docs/{src_uri}"


def _on_site(path: str) -> str:
    """Path on the site of a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else PREFIX + path


def _links(path: str) -> set[str]:
    """Files of the repository outside of docs/ that a Markdown file links to."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = {posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1])) for link in LINK.findall(text)}
    return {name for name in found if not name.startswith(("docs/", "..")) and (ROOT / name).is_file()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    waiting = [*ALWAYS, *(f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md"))]
    seen = set(waiting)
    for path in waiting:
        if not path.startswith("docs/"):
            files.append(File.generated(config, PREFIX + path, abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            new = _links(path) - seen
            seen |= new
            waiting += sorted(new)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri

    def follow(link: re.Match[str]) -> str:
        label, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(_place(here)), target))
        if (ROOT / path).is_dir():
            return label.removeprefix("[").removesuffix("]")  # a folder has no page
        return f"{label}({posixpath.relpath(_on_site(path), posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(follow, markdown)
