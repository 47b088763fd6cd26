"""Run the Python module that Inductor generates for a graph, with stand-ins for device, memory and kernels."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class _Nothing:
    """Stand-in for device functions that the wrapper calls: streams, guards, hooks."""

    def __getattr__(self, name: str) -> _Nothing:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class _Torch:
    """Stand-in for the module torch without devices."""

    cuda = _Nothing()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _reinterpret_tensor(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    guards: Any = torch._C._dynamo.guards
    view: Tensor = guards._reinterpret_tensor(tensor, size, stride, offset)
    return view


_MARK = re.compile(r"^(\s*)# node (\d+)$", re.M)
_REUSE = re.compile(r"^(\s*)(\w+ = .*; del (\w+)) +# reuse$", re.M)


def mark(index: int) -> str:
    """Return the comment that marks the start of a scheduler node in generated code."""
    return f"# node {index}"


def marked_lines(code: str) -> list[tuple[int, int]]:
    """Return the line number of each mark, and the number of its scheduler node."""
    return [(code.count("\n", 0, match.start(2)) + 1, int(match[2])) for match in _MARK.finditer(code)]


def unmarked(code: str) -> str:
    """Remove the marks from generated code."""
    return re.sub(r"^\s*# node \d+\n", "", code, flags=re.M)


def called(
    code: str, stand_ins: Mapping[str, Any], kernel: Callable[[str, str], Any]
) -> Callable[[list[Any]], Sequence[Any]]:
    """Execute a generated module, and return its function `call`.

    Args:
        code: the module, with or without marks (`mark`).
        stand_ins: values for names in the module: `extern_kernels`, `empty_strided_cuda`. `_enter` is called with each
            mark's number, and `_reuse` with a tensor whose memory another result reuses.
        kernel: makes a kernel's stand-in, an object with `run`, from its name and definition.
    """
    defaults: dict[str, Any] = {
        **dict.fromkeys(("assert_size_stride", "assert_size_stride_grouped", "assert_alignment"), _Nothing()),
        **dict.fromkeys(("get_raw_stream", "run_intermediate_hooks", "_enter", "_reuse"), _Nothing()),
        "reinterpret_tensor": _reinterpret_tensor,
        "torch": _Torch(),
        **stand_ins,
    }
    names = dict(defaults)
    skipped = {"get_args", "benchmark_compiled_module"}
    text = _REUSE.sub(r"\1_reuse(\3); \2", _MARK.sub(r"\1_enter(\2)", code))
    for statement in ast.parse(text).body:
        if isinstance(statement, (ast.If, ast.Delete, ast.Expr)) or getattr(statement, "name", "") in skipped:
            continue
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value).startswith("async_compile."):
            targets = [ast.unparse(target) for target in statement.targets]
            names |= {target: kernel(target, ast.unparse(statement.value)) for target in targets}
            continue
        try:
            exec(compile(ast.Module([statement], []), "<generated>", "exec"), names)
        except (ImportError, AttributeError):  # the module belongs to a device that this build of torch lacks
            names |= dict.fromkeys(_bound(statement), _Nothing())
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names |= defaults
    call: Callable[[list[Any]], Sequence[Any]] = names["call"]
    return call


def _bound(statement: ast.stmt) -> list[str]:
    """Return the names that an import or an assignment binds."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in statement.names]
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
