"""Audit kernels without a GPU, to find faults that tests on a GPU see only sometimes.

Each kernel is compiled to TTGIR in every configuration that Inductor would time, and its addresses are evaluated.
`docs/audit.md` lists the kinds of fault.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from .accesses import Fault, Memory, faults
from .gpus import GPU, H200, by_name
from .kernels import Configuration, Kernel, launch_grid, load
from .machine_code import compile_to_ttgir, specialized
from .timeline import PaperCompilation, timeline_of
from .ttgir import Grid, NotAnalyzed, evaluate_launch


@dataclass(frozen=True)
class Finding:
    """A fault in one configuration of a kernel: its kind, the accesses, and the evidence."""

    kernel: str  # "backward: triton_red_fused_sum_0"
    configuration: str  # "XBLOCK 64, R0_BLOCK 8, 4 warps"
    kind: str
    where: str
    evidence: str


@dataclass(frozen=True)
class Audit:
    """The result of `audit`. `notes`: parts that were not analyzed."""

    gpu: str
    kernels: int
    configurations: int
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if there are no findings."""
        return not self.findings

    def __str__(self) -> str:
        kernels, configurations = _counted(self.kernels, "kernel"), _counted(self.configurations, "configuration")
        verdict = _counted(len(self.findings), "finding") if self.findings else "no finding"
        lines = [f"{kernels} in {configurations} for {self.gpu}: {verdict}"]
        groups: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
        for finding in self.findings:
            groups[finding.kernel, finding.kind, re.sub(r" \(.*?\)", "", finding.where)].append(finding)
        for (kernel, kind, _), same in groups.items():
            suffix = f", and {len(same) - 1} more" if len(same) > 1 else ""
            lines += ["", f"{kind}: {kernel} ({same[0].configuration}{suffix})"]
            lines += [f"    {same[0].where}", f"    {same[0].evidence}"]
        lines += ["", "not analyzed:", *(f"    {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines)

    def to_json(self) -> str:
        """Convert to JSON: "gpu", "kernels", "configurations", "ok", "findings", "notes"."""
        return json.dumps({**asdict(self), "ok": self.ok}, indent=1)


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


@dataclass(frozen=True)
class _Launch:
    name: str
    kernel: Kernel
    arguments: Mapping[str, Any]
    sizes: Callable[[Configuration], Sequence[int]]  # grid sizes in a configuration
    zeroed: Collection[str] = ()  # names of arguments whose memory has values before the launch

    @functools.cached_property
    def memory(self) -> dict[str, Memory]:
        numbers: dict[int, int] = {}
        return {name: Memory.of_tensor(v, numbers) for name, v in self.arguments.items() if isinstance(v, Tensor)}

    @functools.cached_property
    def integers(self) -> dict[str, int]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, int)}

    def grid(self, configuration: Configuration, gpu: GPU) -> Grid:
        x, y, z = (*map(int, self.sizes(configuration)), 1, 1)[:3]
        return Grid((x, y, z), configuration.num_warps * gpu.warp_size, gpu.warp_size)


def audit(
    paper_or_kernel: Any,
    *args: Any,
    gpu: GPU | str | None = None,
    grid: Sequence[int] | Callable[..., Sequence[int]] | None = None,
    zeroed: Collection[str] = (),
    **constexprs: Any,
) -> Audit:
    """Look for faults in the kernels of a program, or in one hand-written kernel, without a device.

    A small launch is evaluated completely, a large launch in part (`ttgir.evaluate_launch`).

    Args:
        paper_or_kernel: the result of `compile_on_paper`, or a hand-written kernel: a `triton.jit` function, which
            `triton.autotune` and `triton.heuristics` may wrap.
        *args: the hand-written kernel's arguments. Tensors may be on any device, including "meta". Tensors
            that share memory must share a storage.
        gpu: the GPU to compile for. The default is the program's GPU, or an H200 for a hand-written kernel.
        grid: the hand-written kernel's grid, as Triton accepts it.
        zeroed: names of the hand-written kernel's arguments that have values before the launch, such as zeros. The
            kernel need not write all of their bytes.
        **constexprs: the hand-written kernel's remaining arguments, `num_warps` and `num_stages`, by name.

    Returns:
        The audit, with its findings.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        TypeError: `paper_or_kernel` is neither a program nor a kernel.
        ValueError: the arguments do not fit, or the program does not run without data.
    """
    compiled_for = paper_or_kernel.gpu if isinstance(paper_or_kernel, PaperCompilation) else H200
    gpu = by_name(gpu or compiled_for, "gpu")
    if isinstance(paper_or_kernel, PaperCompilation):
        if args or constexprs or zeroed or grid is not None:
            raise ValueError("args, grid, zeroed: only for a hand-written kernel, not for a program")
        launches = _launches(paper_or_kernel, gpu)
    else:
        launches = iter([_hand_written(paper_or_kernel, args, gpu, grid, zeroed, constexprs)])
    findings: list[Finding] = []
    notes: Counter[str] = Counter()
    seen: set[Any] = set()  # identical launches are examined once
    texts: dict[Any, list[str]] = {}  # kernel -> TTGIR in each configuration
    for launch in launches:
        kernel = launch.kernel
        source = kernel.jit.src.replace(kernel.jit.__name__, "kernel")
        key = source, repr((kernel.signature, kernel.constants, kernel.attrs))
        launched = (*key, repr((launch.memory, launch.integers)))
        if launched in seen:
            continue
        seen.add(launched)
        if key not in texts:
            texts[key] = [compile_to_ttgir(kernel, gpu, configuration) for configuration in kernel.configurations]
        for text, configuration in zip(texts[key], kernel.configurations, strict=True):
            blocks = [f"{name} {size}" for name, size in configuration.block.items()]
            described = ", ".join([*blocks, f"{configuration.num_warps} warps"])
            launch_faults = _faults(launch, launch.grid(configuration, gpu), text, notes)
            findings += [Finding(launch.name, described, *fault) for fault in launch_faults]
    counted = tuple(f"{note} ({count} times)" if count > 1 else note for note, count in notes.items())
    return Audit(gpu.name, len(texts), sum(map(len, texts.values())), tuple(findings), counted)


def _faults(launch: _Launch, grid: Grid, text: str, notes: Counter[str]) -> Iterator[Fault]:
    """Evaluate the addresses of a launch in one configuration. Yield its faults, and count what is not analyzed."""
    try:
        accesses, complete = evaluate_launch(text, launch.integers, grid) if math.prod(grid.sizes) else ([], True)
    except NotAnalyzed as reason:
        notes[f"{launch.name}: {reason}"] += 1
        return
    unknown = [("address", access.name) for access in accesses if not access.argument]
    unknown += [("mask", access.name) for access in accesses if access.argument and not access.mask_known]
    for what, name in dict.fromkeys(unknown):
        notes[f"{launch.name}: the {what} of {name} depends on data or on an operation not evaluated"] += 1
    distinct: dict[tuple[str, str], str] = {}  # an access in a loop is reported once
    for kind, where, evidence in faults(accesses, launch.memory, grid, complete, launch.zeroed):
        distinct.setdefault((kind, where), evidence)
    yield from ((*place, evidence) for place, evidence in distinct.items())


# ---- launches --------------------------------------------------------------------------------------------------------


def _launches(paper: PaperCompilation, gpu: GPU) -> Iterator[_Launch]:
    """Yield a program's launches. Its wrapper runs on meta tensors, which shows the arguments that share memory."""
    calls: list[tuple[str, str, Sequence[Any]]] = []
    timeline_of([paper], launched=lambda *call: calls.append(call))
    for graph, name, args in calls:
        kernel = load(next(kernel.source for kernel in paper.graphs[graph].kernels if kernel.name == name), gpu)
        names = [name for name in kernel.jit.arg_names if name not in kernel.configurations[0].block]
        named = dict(zip([*names, *kernel.inductor_meta.get("extra_launcher_args", ())], args, strict=False))
        yield _Launch(f"{graph}: {name}", kernel, named, functools.partial(launch_grid, kernel, named))


def _hand_written(
    function: Any, args: Sequence[Any], gpu: GPU, grid: Any, zeroed: Collection[str], options: dict[str, Any]
) -> _Launch:
    if not callable(grid) and not isinstance(grid, Sequence):
        raise ValueError(f"grid={grid!r} is not accepted: it must be a tuple of up to three sizes, or a function")
    jit = load(function, gpu).jit
    configurations = _configurations(function, jit.arg_names, args, options)
    kernel, values = specialized(jit, args, {**options, **configurations[0].block}, gpu)
    kernel = replace(kernel, configurations=configurations)
    for name in zeroed:
        if not isinstance(values.get(name), Tensor):
            tensors = [argument for argument, value in values.items() if isinstance(value, Tensor)]
            raise ValueError(f"zeroed: got {name!r}, expected names of tensors among {', '.join(tensors)}")
    named = {name: value for name, value in values.items() if name not in kernel.constants}

    def sizes(configuration: Configuration) -> Sequence[int]:
        blocks: Sequence[int] = grid({**values, **configuration.block}) if callable(grid) else grid
        return blocks

    return _Launch(kernel.jit.__name__, kernel, named, sizes, zeroed)


def _configurations(
    function: Any, names: Sequence[str], args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Configuration, ...]:
    """Return the configurations of `triton.autotune`, with the values that `triton.heuristics` computes for each."""
    values = {**dict(zip(names, args, strict=False)), **options}
    requested = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    configurations = [{**requested}]
    while hasattr(getattr(function, "fn", None), "fn"):  # the wrappers, outermost first
        if hasattr(function, "configs"):
            tuned = [config.all_kwargs() for config in function.configs]
            configurations = [{**before, **config} for before in configurations for config in tuned]
        elif hasattr(function, "values"):
            for configuration in configurations:
                for name, heuristic in function.values.items():
                    configuration[name] = heuristic({**values, **configuration})
        function = function.fn
    return tuple(
        Configuration(
            {name: value for name, value in settings.items() if name in names and name not in requested},
            settings.get("num_warps", 4),
            settings.get("num_stages"),
        )
        for settings in configurations
    )
