"""An audit of kernels: faults that no test on a GPU would see for certain, found without one.

Each kernel is compiled in every configuration that Inductor would time. Addresses are evaluated in TTGIR, registers in
the machine code. `docs/audit.md` lists the kinds of fault.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from . import filled
from .accesses import Memory, faults, traffic
from .gpus import GPU, H200, by_name
from .kernels import Configuration, Kernel, load, written_sizes
from .machine_code import MachineCode, assemble_configuration, bound, cost, lowered, specialization, with_signature
from .registers import unwritten
from .timeline import PaperCompilation, timeline_of
from .ttgir import Grid, NotAnalyzed, sampled
from .work import LANE_INSTRUCTIONS

_MOST_A_THREAD = 32  # elements, for machine code to be made: more compile for seconds
_MANY_BYTES = 8 << 20  # fewer take less time than the launch itself, some 2 µs
_UNCOALESCED = 4  # bytes moved for each that is used
_SPILLED = 0.25  # of the bytes that a thread loads and stores


@dataclass(frozen=True)
class Finding:
    """A fault: of which kind, in which kernel and configuration, in which accesses, and what shows it."""

    kernel: str  # "backward: triton_red_fused_sum_0"
    configuration: str  # "XBLOCK 64, R0_BLOCK 8, 4 warps"
    kind: str
    where: str
    evidence: str


@dataclass(frozen=True)
class Audit:
    """The result of `audit`: findings; `notes` says what was not analyzed and why, `sampled` what only in part."""

    gpu: str
    kernels: int
    configurations: int
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    sampled: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True without a finding."""
        return not self.findings

    def __str__(self) -> str:
        kernels, configurations = _counted(self.kernels, "kernel"), _counted(self.configurations, "configuration")
        verdict = _counted(len(self.findings), "finding") if self.findings else "no finding"
        lines = [f"{kernels} in {configurations} for {self.gpu}: {verdict}"]
        groups: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
        for finding in self.findings:
            groups[finding.kernel, finding.kind, re.sub(r" \(.*?\)", "", finding.where)].append(finding)
        for (kernel, kind, _), same in groups.items():
            more = f", and {len(same) - 1} more" if len(same) > 1 else ""
            lines += ["", f"{kind}: {kernel} ({same[0].configuration}{more})"]
            lines += [f"    {same[0].where}", f"    {same[0].evidence}"]
        for title, texts in (("not analyzed:", self.notes), ("evaluated in part:", self.sampled)):
            lines += ["", title, *(f"    {text}" for text in texts)] if texts else []
        return "\n".join(lines)

    def print(self) -> None:
        """Print the findings."""
        print(self)

    def to_json(self) -> str:
        """The audit as JSON: "gpu", "kernels", "configurations", "ok", "findings", "notes", "sampled"."""
        return json.dumps({**asdict(self), "ok": self.ok}, indent=1)


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


@dataclass(frozen=True)
class _Launch:
    name: str
    kernel: Kernel
    arguments: Mapping[str, Any]
    sizes: Callable[[Configuration], Sequence[int]]  # of the grid
    filled: Collection[str] = ()  # arguments that have values before the launch

    @functools.cached_property
    def memory(self) -> dict[str, Memory]:
        numbers: dict[int, int] = {}
        return {name: Memory.of(v, numbers) for name, v in self.arguments.items() if isinstance(v, Tensor)}

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
    all_configurations: bool = False,
    **constexprs: Any,
) -> Audit:
    """Look for faults in the kernels of a program, or in one hand-written kernel, without a device.

    All programs of a small launch are evaluated, some of a large one. Slow code (uncoalesced, spills, occupancy) is
    reported of a kernel's best configuration, the others of every configuration.

    Args:
        paper_or_kernel: the result of `compile_on_paper`, or a hand-written kernel: a `triton.jit` function,
            also behind `triton.autotune` and `triton.heuristics`.
        *args: the hand-written kernel's arguments, tensors on any device, "meta" included. Tensors that share memory
            must share a storage.
        gpu: the GPU to compile for; by default the program's, or an H200.
        grid: the hand-written kernel's grid, as for Triton.
        zeroed: names of the hand-written kernel's arguments that have values before the launch, such as zeros, so that
            it need not write all of their bytes. Tensors on "meta" that `torch.zeros` or `torch.ones` makes after
            this module is imported, or that are written in place, count without being named.
        all_configurations: look for races and wrong addresses in all blocks and warps that a tuner may reach, and for
            unwritten registers in one of each shape of code among them.
        **constexprs: more of the hand-written kernel's arguments, and `num_warps`, `num_stages`, by name.

    Returns:
        The findings.

    Raises:
        ModuleNotFoundError: when Triton is not installed.
        TypeError: when it is neither a program nor a kernel.
        ValueError: for arguments that do not fit, or a program that does not run without data.
    """
    gpu = by_name(gpu or (paper_or_kernel.gpu if isinstance(paper_or_kernel, PaperCompilation) else H200), "gpu")
    if isinstance(paper_or_kernel, PaperCompilation):
        if args or constexprs or zeroed or grid is not None:
            raise ValueError("args, grid, zeroed: a program has its own; give them with a hand-written kernel")
        launches = _launches(paper_or_kernel, gpu)
    else:
        launches = iter([_hand_written(paper_or_kernel, args, gpu, grid, zeroed, constexprs)])
    auditor = _Auditor(gpu, all_configurations)
    for launch in launches:
        auditor.launch(launch)
    return auditor.result()


# ---- launches --------------------------------------------------------------------------------------------------------


def _launches(paper: PaperCompilation, gpu: GPU) -> Iterator[_Launch]:
    """Yield the launches of a program: its wrapper runs on meta tensors, which tells what shares memory."""
    calls: list[tuple[str, str, Sequence[Any]]] = []
    timeline_of([paper], launched=lambda *call: calls.append(call))
    for graph, name, args in calls:
        kernel = load(next(kernel.source for kernel in paper.graphs[graph].kernels if kernel.name == name), gpu)
        names = [name for name in kernel.jit.arg_names if name not in kernel.configurations[0].block]
        named = dict(zip([*names, *kernel.inductor_meta.get("extra_launcher_args", ())], args, strict=False))
        yield _Launch(f"{graph}: {name}", kernel, named, functools.partial(_generated_grid, kernel, named))


def _generated_grid(kernel: Kernel, named: Mapping[str, Any], configuration: Configuration) -> Sequence[int]:
    from torch._inductor.runtime.triton_heuristics import GridExpr

    options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages or 1}
    grid = GridExpr.from_meta(dict(kernel.inductor_meta), {**configuration.block, **options})
    sizes: Sequence[int] = grid.eval_slow({**named, **configuration.block})
    return sizes


def _hand_written(
    function: Any, args: Sequence[Any], gpu: GPU, grid: Any, zeroed: Collection[str], options: dict[str, Any]
) -> _Launch:
    if not callable(grid) and not isinstance(grid, Sequence):
        raise ValueError(f"grid: {grid!r}; a hand-written kernel needs a tuple of up to three sizes, or a function")
    kernel = load(function, gpu)
    values = bound(kernel.jit, args, options)
    for name in zeroed:
        if not isinstance(values.get(name), Tensor):
            tensors = [each for each, value in values.items() if isinstance(value, Tensor)]
            raise ValueError(f"zeroed: got {name!r}, expected names of tensors among {', '.join(tensors)}")
    configurations = _configurations(function, values, options)
    first = configurations[0]
    compiled = specialization(kernel.jit, (), {**values, **options, **first.block})
    constants = compiled["constants"]
    kernel = with_signature(kernel, compiled["signature"], constants, compiled["divisible_by_16"])
    extra: dict[str, Any] = {name: options[name] for name in ("maxnreg", "enable_fp_fusion") if name in options}
    kernel = replace(kernel, configurations=configurations, options={**kernel.options, **extra}, constants=constants)
    named = {name: value for name, value in values.items() if name in compiled["signature"]}
    is_filled = [name for name, value in named.items() if isinstance(value, Tensor) and filled.known(value)]

    def sizes(configuration: Configuration) -> Sequence[int]:
        blocks: Sequence[int] = grid({**values, **constants, **configuration.block}) if callable(grid) else grid
        return blocks

    return _Launch(kernel.jit.__name__, kernel, named, sizes, {*zeroed, *is_filled})


def _configurations(function: Any, values: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Configuration, ...]:
    """The configurations of `triton.autotune`, with the values that `triton.heuristics` computes in each."""
    given = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    configurations = [{**given}]
    while hasattr(getattr(function, "fn", None), "fn"):  # the wrappers, outermost first
        if hasattr(function, "configs"):
            tuned = [config.all_kwargs() for config in function.configs]
            configurations = [{**before, **config} for before in configurations for config in tuned]
        elif hasattr(function, "values"):
            for configuration in configurations:
                for name, heuristic in function.values.items():
                    configuration[name] = heuristic({**values, **configuration})
        function = function.fn
    names = load(function).jit.arg_names
    return tuple(
        Configuration(
            {name: value for name, value in settings.items() if name in names and name not in given},
            settings.get("num_warps", 4),
            settings.get("num_stages"),
        )
        for settings in configurations
    )


def _reachable(kernel: Kernel) -> Iterator[list[Configuration]]:
    """Yield the configurations that a tuner may reach from Inductor's: any power of 2 for each block, and the warps."""
    from torch._inductor.runtime.hints import TRITON_MAX_BLOCK

    first = kernel.configurations[0]
    if not all(name.endswith("BLOCK") for name in first.block):
        return  # a template's blocks depend on each other
    sizes, written = [], written_sizes(kernel.jit.src)
    for axis in (name.removesuffix("BLOCK") for name in first.block):
        size = written.get(f"{axis.lower()}numel", 1 << 20)
        most = min(TRITON_MAX_BLOCK.get(axis, 1), 1 << (size - 1).bit_length())
        sizes.append([1 << i for i in range(most.bit_length())])
    for blocks in itertools.product(*sizes):
        warps = [warps for warps in (1, 2, 4, 8, 16, 32) if math.prod(blocks) <= 128 * 32 * warps]
        block = dict(zip(first.block, blocks, strict=True))
        yield [Configuration(block, number, first.num_stages) for number in warps]


def _largest(text: str, of: str = "") -> int:
    """The elements of the largest tensor of a kind in TTGIR."""
    shapes = re.findall(rf"tensor<((?:\d+x)+){of}", text)
    return max((math.prod(map(int, shape.split("x")[:-1])) for shape in shapes), default=1)


def _shape_of_code(configuration: Configuration, threads: int, text: str) -> tuple[Any, ...]:
    """Elements a thread, those that lie together, and whether warps exchange: else machine code differs in numbers."""
    elements = max(1, _largest(text) // threads)
    exchange = configuration.num_warps > 1 and bool(re.search(r"tt\.reduce|tt\.scan|convert_layout|ttg\.local", text))
    return elements, exchange, frozenset(re.findall(r"sizePerThread = \[[^]]*", text))


# ---- the audit -------------------------------------------------------------------------------------------------------

_Compiled = tuple[MachineCode, Configuration]


class _Auditor:
    """The findings of one audit; launches that differ in nothing that counts are looked at once."""

    def __init__(self, gpu: GPU, all_configurations: bool) -> None:
        self.gpu, self.all_configurations = gpu, all_configurations
        self.findings: list[Finding] = []
        self.notes: Counter[str] = Counter()
        self.sampled: dict[str, str] = {}  # by launch
        self.seen: set[Any] = set()
        self.configurations = 0
        # by kernel: in the configurations that Inductor would time, and in one of each shape of code
        self.codes: dict[Any, tuple[_Launch, list[_Compiled], dict[Any, _Compiled]]] = {}

    def result(self) -> Audit:
        """The audit of the launches so far: last the machine code, whose listings are made together."""
        for launch, listed, by_shape in self.codes.values():
            for code, configuration in (*listed, *by_shape.values()):
                self.registers(launch, configuration, code)
            self.speed(launch, *min(listed, key=lambda compiled: cost(compiled[0], launch.kernel)))
        notes = tuple(f"{note} ({count} times)" if count > 1 else note for note, count in self.notes.items())
        sampled = tuple(f"{name}: {part}" for name, part in self.sampled.items())
        return Audit(self.gpu.name, len(self.codes), self.configurations, tuple(self.findings), notes, sampled)

    def launch(self, launch: _Launch) -> None:
        """Look at one launch in all configurations."""
        kernel = launch.kernel
        text = kernel.jit.src.replace(kernel.jit.__name__, "kernel")
        compiled = text, repr((kernel.signature, kernel.constants, kernel.attrs))
        if (launched := (*compiled, repr((launch.memory, launch.integers)))) in self.seen:
            return
        self.seen.add(launched)
        if compiled not in self.codes:
            listed = [(assemble_configuration(kernel, self.gpu, c), c) for c in kernel.configurations]
            self.codes[compiled] = launch, listed, {}
            self.configurations += len(listed)
        _, listed, by_shape = self.codes[compiled]
        for code, configuration in listed:
            self.addresses(launch, configuration, code.ttgir)
        for group in _reachable(kernel) if self.all_configurations else ():
            self.configurations += len(group)
            threads_count = True
            for configuration, text in zip(group, lowered(kernel, self.gpu, group), strict=True):
                if threads_count:
                    threads_count = self.addresses(launch, configuration, text)
                shape = _shape_of_code(configuration, configuration.num_warps * self.gpu.warp_size, text)
                if shape[0] <= _MOST_A_THREAD and shape not in by_shape:
                    by_shape[shape] = assemble_configuration(kernel, self.gpu, configuration), configuration

    def add(self, launch: _Launch, configuration: Configuration, kind: str, where: str, evidence: str) -> None:
        blocks = [f"{name} {size}" for name, size in configuration.block.items()]
        blocks_and_warps = ", ".join([*blocks, f"{configuration.num_warps} warps"])
        self.findings.append(Finding(launch.name, blocks_and_warps, kind, where, evidence))

    def addresses(self, launch: _Launch, configuration: Configuration, text: str) -> bool:
        """Evaluate the addresses of a launch in one configuration; tell whether it loads and stores the same memory.

        Else it does not matter which thread holds an element, and other warps have the same faults.
        """
        grid = launch.grid(configuration, self.gpu)
        try:
            accesses, part = sampled(text, launch.integers, grid) if math.prod(grid.sizes) else ([], "")
        except NotAnalyzed as reason:
            self.notes[f"{launch.name}: {reason}"] += 1
            return True
        if part:
            self.sampled.setdefault(launch.name, part)
        for name in {access.name for access in accesses if not access.argument}:
            self.notes[f"{launch.name}: the address of {name} depends on data or on an operation not evaluated"] += 1
        for name in {access.name for access in accesses if access.argument and not access.masked}:
            self.notes[f"{launch.name}: the mask of {name} depends on data or on an operation not evaluated"] += 1
        distinct: dict[tuple[str, str], str] = {}  # an access in a loop is one
        for kind, where, evidence in faults(accesses, launch.memory, grid, whole=not part, filled=launch.filled):
            distinct.setdefault((kind, where), evidence)
        for (kind, where), evidence in distinct.items():
            self.add(launch, configuration, kind, where, evidence)
        kinds = {(launch.memory[access.argument].storage, access.kind) for access in accesses if access.argument}
        return any((storage, "store") in kinds for storage, kind in kinds if kind == "load")

    def registers(self, launch: _Launch, configuration: Configuration, code: MachineCode) -> None:
        reads = [] if self.gpu.is_amd else unwritten(code.asm)
        if reads:
            evidence = f"nothing writes {reads[0][1]} on any path before this; in all {len(reads)} such reads"
            self.add(launch, configuration, "register", reads[0][0], evidence)

    def speed(self, launch: _Launch, code: MachineCode, configuration: Configuration) -> None:
        """Look for slow code in the configuration that a GPU would choose, of a launch that moves many bytes."""
        grid, add = launch.grid(configuration, self.gpu), functools.partial(self.add, launch, configuration)
        count = math.prod(grid.sizes)
        try:
            evaluated, part = sampled(code.ttgir, launch.integers, grid, first=True)
        except NotAnalyzed:
            return
        accesses = list(traffic(evaluated))
        nbytes = sum(access.in_sectors for access in accesses)
        if nbytes * count < _MANY_BYTES and not part:
            return
        slow = [access for access in accesses if access.in_sectors >= _UNCOALESCED * max(1, access.used)]
        slow_bytes = sum(access.in_sectors for access in slow)
        for access in slow:  # a few bytes beside many do not count
            if slow_bytes > nbytes / 2 and 2 * len(slow) * access.in_sectors >= slow_bytes:
                times = access.in_sectors / max(1, access.used)
                evidence = f"moves {times:.0f} × its bytes: {access.in_sectors:,} bytes in sectors for {access.used:,}"
                add("uncoalesced", str(access.access), evidence)
        if code.spills > _SPILLED * max(1, code.bytes_accessed):
            evidence = f"{code.spills} bytes a thread, which loads and stores {code.bytes_accessed} bytes"
            add("spills", f"{code.registers} registers", evidence)
        _, roofline, instructions = cost(code, launch.kernel)
        gpu, threads, shared = self.gpu, code.threads, code.shared
        registers = -(-max(1, code.registers) // 8) * 8 * threads // (2 if gpu.is_amd else 1)
        blocks = min(  # the system takes 1024 bytes of each block
            gpu.max_threads_per_multi_processor // threads,
            gpu.regs_per_multiprocessor // registers,
            (gpu.shared_memory_per_block_optin + 1024) // (shared + 1024),
        )
        if blocks < 2 and count > gpu.multi_processor_count and roofline > instructions / LANE_INSTRUCTIONS:
            evidence = f"{code.registers} registers of {threads} threads, {shared:,} bytes of shared memory"
            add("occupancy", f"{blocks} block a multiprocessor", evidence)
