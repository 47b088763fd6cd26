"""Short sentences: figures of the pages' prose, which may only fall."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
if not (ROOT / "docs").is_dir():
    pytest.skip("not in a clone", allow_module_level=True)
# At most; a change may lower a number.
LIMITS = {"words": 14000, "words a sentence": 11, "% over 30 words": 1, "% with a colon": 13, "long paragraphs": 1}
SKIPPED = re.compile(r"\s*(\||#|:::|<!--|!\[|---)|    \S")


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and list items, without code, tables, headings, comments, links' targets and emphasis."""
    text = re.sub(r"<!--.*?-->|^\s*```.*?^\s*```", "", text, flags=re.S | re.M)
    item: list[str] = []
    for line in [*text.splitlines(), ""]:
        begins = re.match(r"\s*([-*]|\d+\.)\s+", line)
        if begins or not line.strip() or (SKIPPED.match(line) and not item):
            if item:
                yield re.sub(r"\]\([^)]*\)|[*>\[\]]", "", re.sub(r"`[^`]*`", "code", " ".join(item)))
            item = []
        if line.strip() and not SKIPPED.match(line[len(begins[0]) :] if begins else line.strip()):
            item.append(line[len(begins[0]) :] if begins else line.strip())


def figures(pages: list[Path]) -> dict[str, float]:
    blocks = [block for page in pages for block in paragraphs(page.read_text(encoding="utf-8"))]
    sentences = [s for block in blocks for s in re.split(r"(?<=[.!?])\s+(?=[A-Z0-9(\"“c])", block)]
    lengths = [len(s.split()) for s in sentences]
    return {
        "words": sum(lengths),
        "words a sentence": sum(lengths) / len(lengths),
        "% over 30 words": 100 * sum(n > 30 for n in lengths) / len(lengths),
        "% with a colon": 100 * sum(bool(re.search("[:;] ", s)) for s in sentences) / len(lengths),
        "long paragraphs": sum(len(block.split()) > 80 for block in blocks),
    }


def test_prose_is_short() -> None:
    found = figures([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert {name: value for name, value in found.items() if value > LIMITS[name]} == {}, found


def test_the_figures_notice_long_sentences(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = f"# Not prose\n\n| a | table |\n\nTwo `code words`. Long {'word ' * 90}: end.\n\n```\nx: {'w ' * 99}\n```\n"
    page.write_text(text)
    found = figures([page])
    assert found["words"] == 95 and found["long paragraphs"] == 1 and found["% over 30 words"] == 50
    assert found["% with a colon"] == 50


def test_the_first_page_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110 and max(map(len, lines)) <= 160
    assert "pip install -e . && python examples/quickstart.py" in lines
    assert 'pip install -e ".[test]" && pytest' in lines
