"""MkDocs hook: the site's pages are the repository's Markdown files, at the same places, and the generated references.

So a link that works in the repository works on the site. A file that a page links to (a picture, a job file) is served
beside it.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import reference

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\]\(([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds every page of the navigation, and what they link to."""
    linked: set[str] = set()
    for name in sorted(set(_pages(config.nav)) | {f"docs/decisions/{path.name}" for path in _decisions()}):
        if name in reference.PAGES:
            files.append(File.generated(config, name, content=reference.PAGES[name]()))
        else:
            path = ROOT / name
            files.append(File.generated(config, name, abs_src_path=str(path)))
            linked |= _links(name, path.read_text(encoding="utf-8"))
    for name in sorted(linked):
        path = ROOT / name
        if path.is_file() and path.suffix != ".md":
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def _decisions() -> list[Path]:
    return sorted((ROOT / "docs" / "decisions").glob("*.md"))


def _pages(nav: Any) -> Iterator[str]:
    """The files of a navigation, however deep."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for item in nav.values():
            yield from _pages(item)
    elif nav is not None:
        for item in nav:
            yield from _pages(item)


def _links(page: str, text: str) -> set[str]:
    """Files of the repository that a page links to, by their path from the root."""
    targets = (target for target in _LINK.findall(text) if "://" not in target)
    return {posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) for target in targets}
