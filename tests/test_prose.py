"""Plain words: counts of phrases and names that make a reader go back. The counts may only fall."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"product": ("torch_fused_ops", "lowerings"), "tests": ("tests", "benchmarks", "examples"), "docs": ("docs",)}
if not (ROOT / "docs").is_dir():
    pytest.skip("not in a clone", allow_module_level=True)

# A change may lower a number, and not raise it.
LIMITS = {
    "product": {"sentences": 54, "names": 21, "private words": 0},
    "tests": {"sentences": 18, "names": 65},
    "docs": {"sentences": 27, "words": 23850, "long paragraphs": 1},
}

IS = r"\b(?:is|are|was|were|be|been)"
PHRASES = (
    r"\b(?:[Ww]hat|[Ww]hatever|[Ww]hoever)\b(?!.*\?$)|^Who\b",  # a clause in place of a noun
    r"\b(?:that|those|these) of\b|\b[Tt]hose (?:that|which|who|in)\b",
    r"\b(?:the|this|that|each|any|which|no) ones?\b|\bone of (?:it|them|those|these)\b",
    r"^(?:Of|Nor|Neither|Likewise|Not|None|Where|Which|Whether|There|All that|Only where)\b",
    rf"{IS} (?:no|none|nothing|nobody)\b(?! longer| more than| less than)|\bno \w+ but\b",
    r"\bbut for\b|\b(?:all|nothing|none|anything|everything) but\b",
    r"\b(?:likewise|besides|beside (?:it|them)|alike|above all|in any case|as (?:it|they) (?:is|are|was|were))\b",
    r"(?<!\")\b(?:stands?(?! for)|stood|lies?|kept|keeps?|rebuil[dt]s?|(?:made|computed?|computes) again)\b",
    r"\bhand(?:s|ed|ing)? (?:over|on|back|in|it|out)\b|\btakes? part\b",
    rf"{IS} (?:wanted|asked|meant|told|said|looked for)\b|\basks? (?:for|of|which|whether)\b",
    r"(?<!it)(?<!that)\b\w+'s(?=[.,;:)]|$| (?:is|are|and|or|in|to|as|has|alone)\b)",
    r", too\b|\btoo[.:)]|\balso\.$",
    r"\b(?:there|elsewhere)[.;:)]|\b[wW]here there is\b",
    r"(?:\b(?:that|which|whose|whom|what|who)\b.*){3,}",
)
FLAGGED = re.compile("|".join(f"(?:{phrase})" for phrase in PHRASES))
NAMES = (
    "asked|wanted|given|found|there|here|own|one|each|rest|kept|held|made|moved|told|again|whole|what|whose|others"
    "|theirs|ours|both|stands|turned|apart|wrong|thing|things|some|such|shown|drawn|less|more"
)
STORES = re.compile(rf"\b({NAMES})\b(?=(?:, \w+)* (?:=|in)(?!=) |: [\w.\[\], |]+(?: =|[,)]))")
VAGUE_TESTS = re.compile(r"def test_(what|who|whose|where|when|which|that|only|nothing|it|all|one|those|there|in|of)_")
PRIVATE = re.compile(
    r"\b(?:pick-up|picked up|handed over|made again|left alone|is no (?:site|MLP|file)|quantis|recognis)\w*", re.I
)


def paragraphs(path: Path) -> Iterator[str]:
    """Yield a page's paragraphs, list items and cells, or a module's docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"<!--.*?-->|^\s*```.*?^\s*```|^(?:#|    )[^\n]*$", "", text, flags=re.S | re.M)
        text = re.sub(r"\]\([^)]*\)|\*(?! )|[>\[\]]", "", re.sub(r"`[^`]*`", "code", text))
        yield from re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) |^\|[-|: ]+$|\|", text, flags=re.M)
        return
    yield from (
        part for block in re.findall(r'^\s*"""(?=\S)(.*?)"""', text, re.S | re.M) for part in block.split("\n\n")
    )
    for block in re.findall(r"^ *#(?!.*----).*(?:\n *#.*)*", text, re.M):
        yield re.sub(r"^ *#+", "", block, flags=re.M)
    yield from re.findall(r"\S.*  # (?!type:|noqa|fmt:)(.+)$", text, re.M)


def count(area: str) -> Counter[str]:
    """Count an area's flagged sentences, words, long paragraphs and empty names."""
    files = [path for folder in FOLDERS[area] for path in (ROOT / folder).rglob("*.md" if area == "docs" else "*.py")]
    counts: Counter[str] = Counter()
    for path in files + [ROOT / "README.md"] * (area == "docs"):
        for block in paragraphs(path):
            words = len(block.split())
            counts["words"] += words
            counts["long paragraphs"] += words > 80
            sentences = re.split(r"(?<=[.!?:])\s+(?=[A-Z`\"(])", " ".join(block.split()))
            counts["sentences"] += sum(bool(FLAGGED.search(sentence)) for sentence in sentences)
        if area != "docs":
            text = path.read_text(encoding="utf-8")
            counts["names"] += len(STORES.findall(text)) + len(VAGUE_TESTS.findall(text))
            counts["private words"] += len(PRIVATE.findall(text))
    return counts


@pytest.mark.parametrize("area", LIMITS)
def test_counts_only_fall(area: str) -> None:
    counts = count(area)
    assert all(counts[kind] <= most for kind, most in LIMITS[area].items()), f"{counts}: say it in plain words"


def test_phrases_and_names_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, page = tmp_path / "lowerings" / "module.py", tmp_path / "README.md"
    module.parent.mkdir()
    module.write_text('"""Of what is kept."""\n\nfound = 1  # those of them\nplain = 2  # a value\n')
    page.write_text(f"# What\n\nNobody is told.\n\n{'word ' * 90}end.\n\n```\nwhat = 1\n```\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    product, docs = count("product"), count("docs")
    assert (product["sentences"], product["names"]) == (2, 1)
    assert (docs["sentences"], docs["words"], docs["long paragraphs"]) == (1, 94, 1)


def test_the_first_page_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110 and max(map(len, lines)) <= 160
    assert "pip install -e . && python examples/quickstart.py" in lines
    assert 'pip install -e ".[test]" && pytest' in lines
