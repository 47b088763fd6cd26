"""docs/recognition.md explains every reason that the recogniser gives."""

import ast
from pathlib import Path

import pytest

from torch_fused_ops.lowerings import recognise

SOURCES = sorted(Path(recognise.__file__).parent.glob("*.py"))
PAGE = Path(__file__).parents[2] / "docs" / "recognition.md"


def reasons():
    """The longest fixed part of each message that a Refusal or a Verdict is made of."""
    for source in SOURCES:
        for call in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("Refusal", "Verdict"):
                given = [*call.args, *(k.value for k in call.keywords if k.arg == "reason")]
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
