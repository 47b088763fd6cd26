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

from .accesses import Memory, faults
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

    def print(self) -> None:
        """Print the findings."""
        print(self)

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
    gpu = by_name(gpu or (paper_or_kernel.gpu if isinstance(paper_or_kernel, PaperCompilation) else H200), "gpu")
    if isinstance(paper_or_kernel, PaperCompilation):
        if args or constexprs or zeroed or grid is not None:
            raise ValueError("args, grid, zeroed: only for a hand-written kernel, not for a program")
        launches = _launches(paper_or_kernel, gpu)
    else:
        launches = iter([_hand_written(paper_or_kernel, args, gpu, grid, zeroed, constexprs)])
    auditor = _Auditor(gpu)
    for launch in launches:
        auditor.launch(launch)
    return auditor.result()


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


# ---- the audit -------------------------------------------------------------------------------------------------------


class _Auditor:
    """Collects the findings of one audit. Identical launches are examined once."""

    def __init__(self, gpu: GPU) -> None:
        self.gpu = gpu
        self.findings: list[Finding] = []
        self.notes: Counter[str] = Counter()
        self.seen: set[Any] = set()
        self.texts: dict[Any, list[str]] = {}  # kernel -> TTGIR in each configuration

    def result(self) -> Audit:
        """Return the audit of all launches so far."""
        configurations = sum(map(len, self.texts.values()))
        notes = tuple(f"{note} ({count} times)" if count > 1 else note for note, count in self.notes.items())
        return Audit(self.gpu.name, len(self.texts), configurations, tuple(self.findings), notes)

    def launch(self, launch: _Launch) -> None:
        """Examine one launch in all configurations."""
        kernel = launch.kernel
        text = kernel.jit.src.replace(kernel.jit.__name__, "kernel")
        key = text, repr((kernel.signature, kernel.constants, kernel.attrs))
        if (launched := (*key, repr((launch.memory, launch.integers)))) in self.seen:
            return
        self.seen.add(launched)
        if key not in self.texts:
            self.texts[key] = [compile_to_ttgir(kernel, self.gpu, c) for c in kernel.configurations]
        for text, configuration in zip(self.texts[key], kernel.configurations, strict=True):
            self.addresses(launch, configuration, text)

    def add(self, launch: _Launch, configuration: Configuration, kind: str, where: str, evidence: str) -> None:
        blocks = [f"{name} {size}" for name, size in configuration.block.items()]
        blocks_and_warps = ", ".join([*blocks, f"{configuration.num_warps} warps"])
        self.findings.append(Finding(launch.name, blocks_and_warps, kind, where, evidence))

    def addresses(self, launch: _Launch, configuration: Configuration, text: str) -> None:
        """Evaluate the addresses of a launch in one configuration, and add the faults."""
        grid = launch.grid(configuration, self.gpu)
        try:
            accesses, complete = evaluate_launch(text, launch.integers, grid) if math.prod(grid.sizes) else ([], True)
        except NotAnalyzed as reason:
            self.notes[f"{launch.name}: {reason}"] += 1
            return
        for name in {access.name for access in accesses if not access.argument}:
            self.notes[f"{launch.name}: the address of {name} depends on data or on an operation not evaluated"] += 1
        for name in {access.name for access in accesses if access.argument and not access.mask_known}:
            self.notes[f"{launch.name}: the mask of {name} depends on data or on an operation not evaluated"] += 1
        distinct: dict[tuple[str, str], str] = {}  # an access in a loop is reported once
        for kind, where, evidence in faults(accesses, launch.memory, grid, complete, launch.zeroed):
            distinct.setdefault((kind, where), evidence)
        for (kind, where), evidence in distinct.items():
            self.add(launch, configuration, kind, where, evidence)
