"""The Markdown pages: their links lead somewhere, the two READMEs say the same, each page keeps to its kind."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("data_pipeline", "pserver", "trainer", "deploy", "docs")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    return FENCE.sub("", text_of(page))


def anchors_of(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{target}: no such file"
        assert not anchor or anchor in anchors_of(file), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lists_and_tables_begin_after_a_blank_line(page: Path) -> None:
    """GitHub shows them without one, the site does not."""
    lines = prose_of(page).splitlines()
    for before, line in itertools.pairwise(lines):
        if line.startswith(("- ", "| ")) and before.strip():
            same = before.startswith(("- ", "  ", "|")) if line.startswith("- ") else before.startswith("|")
            assert same, f"no blank line before {line!r}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name == "README.md"], ids=str)
def test_a_readme_has_at_most_150_lines(page: Path) -> None:
    assert len(text_of(page).splitlines()) <= 150


def test_the_chinese_readme_says_what_the_english_one_says() -> None:
    english, chinese = text_of(ROOT / "README.md"), text_of(ROOT / "README.zh-CN.md")

    def shape(text: str) -> dict[str, object]:
        prose = FENCE.sub("", text)
        code = [re.sub(r"\s*#.*", "", block) for _, block in FENCE.findall(text)]
        rows = [line.split("|")[1].count("`") for line in prose.splitlines() if line.startswith("|")]
        targets = re.findall(r"\]\(([^)]+)\)", prose)
        return {
            "headings": [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)],
            "code": code,
            "rows of tables": rows,
            "bullets": len(re.findall(r"^- ", prose, re.MULTILINE)),
            "links": sorted(target for target in targets if not target.startswith("README")),
            "inline code": sorted(set(re.findall(r"`([^`]+)`", prose))),
            "figures": sorted(set(re.findall(r"\d[\d.,]*\d", re.sub(r"`[^`]*`", "", prose)))),
        }

    ours, theirs = shape(english), shape(chinese)
    for what, value in ours.items():
        assert theirs[what] == value, what


def test_every_decision_is_listed_under_its_title() -> None:
    index = text_of(ROOT / "docs" / "decisions" / "README.md")
    listed = dict(re.findall(r"^- \[(.+?)\]\((\d{3}-[\w-]+\.md)\)$", index, re.MULTILINE))
    titles = {text_of(page).partition("\n")[0].removeprefix("# "): page.name for page in DECISIONS}
    assert listed == titles
    assert [int(page.name[:3]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_context_decision_and_consequences(page: Path) -> None:
    number = int(page.name[:3])
    assert text_of(page).startswith(f"# {number}. ")
    headings = re.findall(r"^## (.*)$", text_of(page), re.MULTILINE)
    expected = ["Context", "Decision", "Consequences", "Rejected alternatives"]
    assert headings in (expected, expected[:3])


def test_terms_of_the_glossary_are_explained_once() -> None:
    glossary = text_of(ROOT / "ARCHITECTURE.md").partition("## Glossary")[2]
    terms = [
        term.strip() for cell in re.findall(r"^\| \*\*(.+?)\*\* \|", glossary, re.MULTILINE) for term in cell.split(",")
    ]
    assert len(terms) == len(set(terms)) >= 25
    assert {"attempt", "member", "worker", "agent", "coordinator", "lease", "slice", "cursor", "manifest"} <= set(terms)
