"""Compile a kernel's machine code for a described GPU without a device: instructions, registers, spills."""

from __future__ import annotations

import functools
import math
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .accesses import traffic
from .gpus import GPU, H200, described, import_triton
from .kernels import Configuration, Kernel, load, written_sizes
from .sass import Listing, nvidia_tools
from .ttgir import Grid, NotAnalyzed, evaluate
from .work import BYTES_MOVED, LANE_INSTRUCTIONS

# The mnemonic of an instruction in nvdisasm's listing: "/*0070*/  @!P0 FMUL R0, R1, R2 ;".
SASS_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", re.M)
AMD_INSTRUCTION = re.compile(r"^\t([a-z]\w*)", re.M)
AMD_PADDING = ("s_nop", "s_code_end")
# Accesses to global memory: "LDG.E.128", "STG.E.U16"; 4 bytes by default.
_ACCESS = re.compile(r"(?:LDG|STG)\.(.*)")
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True)
class MachineCode:
    """A kernel as the GPU runs it.

    Attributes:
        gpu: the GPU it was compiled for.
        registers: 32-bit vector registers per thread.
        spills: bytes per thread of registers spilled to memory.
        shared: bytes of shared memory per block.
        elements: elements per block, the product of its sizes.
        threads: threads per block.
        block: the block's sizes by name, except sizes that the kernel's source fixes.
        ptx: PTX; empty on AMD.
        ttgir: Triton's last intermediate form with tensors and their layouts.
        listing: the machine code as text, or a `Listing` that disassembles it on first use.
    """

    gpu: GPU
    registers: int
    spills: int
    shared: int
    elements: int
    threads: int
    ptx: str = field(repr=False)
    listing: Listing | str = field(repr=False)
    block: Mapping[str, int] = field(default_factory=dict)
    ttgir: str = field(default="", repr=False)

    @property
    def asm(self) -> str:
        """The machine code's listing."""
        return self.listing if isinstance(self.listing, str) else self.listing.text

    @functools.cached_property
    def instructions(self) -> tuple[str, ...]:
        """The mnemonics of the whole kernel in order, without padding: "FFMA", "v_fma_f32"."""
        if self.gpu.is_amd:
            code = (self.asm.partition("; %bb.0:")[2] or self.asm).partition(".Lfunc_end0")[0]  # skip directives
            return tuple(name for name in AMD_INSTRUCTION.findall(code) if name not in AMD_PADDING)
        return tuple(name for name in SASS_INSTRUCTION.findall(self.asm) if name != "NOP")

    @property
    def bytes_accessed(self) -> int:
        """Bytes per thread that loads and stores in an NVIDIA kernel's text move from and to global memory."""
        nbytes = 0
        for access in filter(None, map(_ACCESS.fullmatch, self.instructions)):
            nbytes += next((_WIDTHS[word] for word in access[1].split(".") if word in _WIDTHS), 4)
        return nbytes

    def instructions_per_element(self) -> float:
        """Return the number of instructions in the kernel's text divided by the elements per thread.

        Counts the text, not its execution: exact for pointwise kernels without loops. In a loop, every instruction
        counts once.
        """
        return len(self.instructions) * self.threads / self.elements


def assemble(
    kernel: Any,
    gpu: GPU = H200,
    *args: Any,
    num_warps: int | None = None,
    block: int | Mapping[str, int] | None = None,
    **constexprs: Any,
) -> MachineCode:
    """Compile a kernel for `gpu` with Triton, and analyze the machine code.

    Args:
        kernel: a `GeneratedKernel`, or a hand-written `triton.jit` function.
        gpu: the GPU to compile for. A generated kernel has the block sizes of the GPU it was generated for.
        *args: a hand-written kernel's arguments. Tensors may be on any device, including "meta". As in a launch, only
            dtypes, and divisibility by 16 of integers and of tensors' first bytes matter.
        num_warps: warps per block; 4 by default for a hand-written kernel.
        block: sizes of a block by name, {"BLOCK": 1024}, or XBLOCK as a number. Their product is the number of
            elements; a hand-written kernel without sizes counts as one element per block.
        **constexprs: a hand-written kernel's remaining arguments and launch options by name.

    Without `block` and `num_warps`, a generated kernel is compiled in the configuration that Inductor tries first. A
    reduction with a loop is compiled in every configuration that Inductor would time, and the cheapest one is returned:
    the fewest spills, then the least roofline time per byte, by sectors and instructions (`cost`).
    `MachineCode.block` and `threads` hold the configuration.

    Returns:
        The machine code.

    Raises:
        TypeError: `kernel` is not a kernel, or an argument is missing or does not fit.
        ValueError: `block` does not fit the kernel's arguments.
    """
    loaded = load(kernel, gpu)
    blocks = {"XBLOCK": block} if isinstance(block, int) else dict(block or {})
    if not loaded.signature:
        loaded, _ = specialized(loaded.jit, args, {**constexprs, **blocks}, gpu)
    elif args or constexprs:
        raise ValueError("args, constexprs: a generated kernel has its own; omit them")
    for name in blocks:
        if loaded.signature.get(name) != "constexpr":
            accepted = [name for name, kind in loaded.signature.items() if kind == "constexpr"]
            raise ValueError(f"block: got {name!r}, expected one of {accepted}")
    if blocks or num_warps or not loaded.inductor_meta:
        first = loaded.configurations[0]
        configuration = Configuration({**first.block, **blocks}, num_warps or first.num_warps, first.num_stages)
        return assemble_configuration(loaded, gpu, configuration)
    tried = compile_candidates(loaded, gpu)
    if len(tried) > 1:  # only here: `cost` reads listings
        tried[:] = [min(tried, key=lambda code: cost(code, loaded))]
    return tried[0]


def cost(code: MachineCode, kernel: Kernel) -> tuple[float, ...]:
    """Return the sort key of a configuration, best first: spills, roofline time per byte, instructions per byte.

    All configurations use the same bytes, but each program moves whole sectors. Instructions are divided by
    `bytes_accessed`, so that unrolling a loop does not change the ratio.
    """
    program, grid = torch.zeros(1, dtype=torch.int64, device="cpu"), Grid((1, 1, 1), code.threads, code.gpu.warp_size)
    try:
        evaluated, _ = evaluate(code.ttgir, written_sizes(kernel.jit.src), program, grid, max_iterations=4)
        accesses = list(traffic(evaluated))
    except NotAnalyzed:
        accesses = []  # assume that each access moves only the bytes it uses
    sectors = sum(access.in_sectors for access in accesses) / max(1, sum(access.used for access in accesses)) or 1.0
    instructions = len(code.instructions) / max(code.bytes_accessed, 1)
    return code.spills, max(sectors / BYTES_MOVED, instructions / LANE_INSTRUCTIONS), instructions


_CANDIDATES: dict[Any, list[MachineCode]] = {}  # a kernel's key -> its compiled configurations, later only the best


def compile_candidates(kernel: Kernel, gpu: GPU) -> list[MachineCode]:
    """Compile a kernel in Inductor's first configuration, or a reduction with a loop in all of them.

    Listings are made when one is read, together with those of all other kernels that wait.
    """
    tried = kernel.configurations
    if not any(name.startswith("R") for name in tried[0].block):
        tried = tried[:1]
    key = gpu, kernel.jit.src, repr((kernel.signature, kernel.constants, kernel.attrs, kernel.options, tried))
    if key not in _CANDIDATES:
        _CANDIDATES[key] = [assemble_configuration(kernel, gpu, configuration) for configuration in tried]
    return _CANDIDATES[key]


def assemble_configuration(kernel: Kernel, gpu: GPU, configuration: Configuration) -> MachineCode:
    """Compile a kernel in one configuration."""
    triton = import_triton()
    values = {**kernel.constants, **configuration.block}
    values = {name: value for name, value in values.items() if name in kernel.signature}
    ASTSource = import_triton("triton.compiler").ASTSource
    source = ASTSource(fn=kernel.jit, signature=dict(kernel.signature), constexprs=values, attrs=dict(kernel.attrs))
    options = {**kernel.options, "num_warps": configuration.num_warps}
    if configuration.num_stages is not None:
        options["num_stages"] = configuration.num_stages
    with described(gpu):
        compiled = triton.compile(source, target=gpu.target(), options=options)
    # A persistent reduction fixes a block size in its body: `R0_BLOCK: tl.constexpr = 1024`.
    fixed = re.findall(r"^\s+(R\d_BLOCK)\s*:\s*tl\.constexpr\s*=\s*(\d+)", kernel.jit.src, re.M)
    elements = math.prod({**{name: int(size) for name, size in fixed}, **configuration.block}.values())
    threads, block, text = configuration.num_warps * gpu.warp_size, dict(configuration.block), compiled.asm["ttgir"]
    registers, spills, shared, ptx, listing = (_amd_code if gpu.is_amd else _nvidia_code)(compiled)
    return MachineCode(gpu, registers, spills, shared, elements, threads, ptx, listing, block, text)


def specialized(jit: Any, args: Sequence[Any], options: Mapping[str, Any], gpu: GPU) -> tuple[Kernel, dict[str, Any]]:
    """Bind a hand-written kernel's arguments and launch options as Triton does in a launch on `gpu`.

    Returns:
        The kernel with the arguments' types and constants, and all parameters' values by name.

    Raises:
        TypeError: an argument is missing, unknown, or of a type that Triton does not accept.
    """
    with described(gpu):
        *_, backend, bind = jit.create_binder()
        try:
            values, types, launch_options = bind(*args, **options)
            _, signature, constants, attrs = jit._pack_args(backend, dict(options), values, types, launch_options)
        except (TypeError, KeyError) as error:
            names = ", ".join(jit.arg_names)
            raise TypeError(f"{jit.__name__}({names}) does not accept these arguments: {error.args[0]}") from error
    constants = {jit.arg_names[i]: value for (i,), value in constants.items()}
    configuration = Configuration({}, options.get("num_warps", 4), options.get("num_stages"))
    flags = {"enable_fp_fusion": True, **launch_options}
    for name in ("num_warps", "num_stages"):
        flags.pop(name, None)
    kernel = Kernel(jit, signature, constants, attrs, flags, (configuration,))
    return kernel, values


def _nvidia_code(compiled: Any) -> tuple[Any, ...]:
    """Return registers, spills, shared memory, PTX and listing."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        command = [str(nvidia_tools() / "cuobjdump"), "-res-usage", str(file)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    target = re.search(r"^\s*\.target\s+(\w+)", ptx, re.M)
    assert target is not None, ptx[:400]
    return used["REG"], used["STACK"] + used["LOCAL"], compiled.metadata.shared, ptx, Listing(cubin, target[1])


def _amd_code(compiled: Any) -> tuple[Any, ...]:
    """Return registers, spills, shared memory, an empty PTX, and listing."""
    asm = compiled.asm["amdgcn"]
    used = {name: int(value) for name, value in re.findall(r"^\s*-?\s*\.(\w+):\s+(\d+)\s*$", asm, re.M)}
    return used["vgpr_count"], 4 * used["vgpr_spill_count"], used["group_segment_fixed_size"], "", asm
