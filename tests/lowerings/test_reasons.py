"""docs/recognition.md explains every reason that the recogniser gives."""

import ast
from pathlib import Path

import pytest

from torch_fused_ops.lowerings import recognise

SOURCES = sorted(Path(recognise.__file__).parent.glob("*.py"))
PAGE = Path(__file__).parents[2] / "docs" / "recognition.md"


def reasons():
    """The longest fixed part of each message that a Refusal or a Verdict is made of, or that ``unread`` gives."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            given = []
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Refusal", "Verdict"):
                given = [*node.args, *(k.value for k in node.keywords if k.arg == "reason")]
            elif isinstance(node, ast.FunctionDef) and node.name == "unread":
                given = [inner for inner in ast.walk(node) if isinstance(inner, ast.JoinedStr)]
            for argument in given:
                if isinstance(argument, (ast.JoinedStr, ast.Constant)):
                    parts = [argument] if isinstance(argument, ast.Constant) else argument.values
                    texts = [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
                    if texts:
                        yield max(texts, key=len).strip()


def test_reasons_are_found():
    assert len(set(reasons())) > 25


@pytest.mark.parametrize("reason", sorted(set(reasons())))
def test_explained(reason):
    assert reason in PAGE.read_text(encoding="utf-8")
