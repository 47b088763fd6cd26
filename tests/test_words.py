"""Plain words: docstrings say what a thing is or does, and names what they hold. The counts may only fall."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / "torch_fused_ops", ROOT / "lowerings"]
if not all(folder.is_dir() for folder in FOLDERS):
    pytest.skip("not in a clone", allow_module_level=True)

QUESTIONS = re.compile(r"(What|Who|Whose|Whether|Which|How|That|Where|When|Of)\b")
EMPTY = {"found", "one", "given", "own", "kept", "held", "made", "moved", "rest", "each"}
# Words that the field has others for, in the texts that users read (docs/reasons.json, messages, help).
PRIVATE = re.compile(
    r"\b(pick-up|picked up|handed over|made again|left alone|is no (site|MLP|file)|quantis|recognis)\w*", re.I
)

# At most; a change may lower a number.
LIMITS = {"docstrings": 0, "names": 84, "private words": 3}


def counts() -> Counter[str]:
    """Occurrences in the product's sources."""
    total: Counter[str] = Counter()
    for path in (path for folder in FOLDERS for path in folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                total["docstrings"] += bool(QUESTIONS.match(ast.get_docstring(node) or ""))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                total["names"] += node.id in EMPTY
            elif isinstance(node, ast.arg):
                total["names"] += node.arg in EMPTY
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                total["private words"] += len(PRIVATE.findall(node.value))
    return total


def test_counts_only_fall() -> None:
    counted = counts()
    assert all(counted[what] <= most for what, most in LIMITS.items()), f"{counted}: say it in plain words"
