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
from unittest import mock

from .gpus import GPU, H200, described, import_triton
from .kernels import Configuration, Kernel, load

# The mnemonic of an instruction in nvdisasm's listing: "/*0070*/  @!P0 FMUL R0, R1, R2 ;".
SASS_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", re.M)
AMD_INSTRUCTION = re.compile(r"^\t([a-z]\w*)", re.M)
AMD_PADDING = ("s_nop", "s_code_end")


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
        binary: the compiled kernel: an ELF file, on AMD assembly.
    """

    gpu: GPU
    registers: int
    spills: int
    shared: int
    elements: int
    threads: int
    ptx: str = field(repr=False)
    binary: bytes = field(repr=False)
    block: Mapping[str, int] = field(default_factory=dict)

    @functools.cached_property
    def asm(self) -> str:
        """The machine code's listing: ``/*0070*/  @!P0 FMUL R0, R1, R2 ;``."""
        return self.binary.decode() if self.gpu.is_amd else _nvidia_tool("nvdisasm", self.binary, "-c")

    @functools.cached_property
    def instructions(self) -> tuple[str, ...]:
        """The mnemonics of the whole kernel in order, without padding: "FFMA", "v_fma_f32"."""
        if self.gpu.is_amd:
            code = (self.asm.partition("; %bb.0:")[2] or self.asm).partition(".Lfunc_end0")[0]  # skip directives
            return tuple(name for name in AMD_INSTRUCTION.findall(code) if name not in AMD_PADDING)
        return tuple(name for name in SASS_INSTRUCTION.findall(self.asm) if name != "NOP")

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

    Without `block` and `num_warps`, a generated kernel is compiled in the configuration that Inductor tries first.
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
    first = loaded.configurations[0]
    configuration = Configuration({**first.block, **blocks}, num_warps or first.num_warps, first.num_stages)
    compiled = _compiled(loaded, gpu, configuration)
    # A persistent reduction fixes a block size in its body: `R0_BLOCK: tl.constexpr = 1024`.
    fixed = re.findall(r"^\s+(R\d_BLOCK)\s*:\s*tl\.constexpr\s*=\s*(\d+)", loaded.jit.src, re.M)
    sizes = {name: int(size) for name, size in fixed} | dict(configuration.block)
    elements = math.prod(sizes.values())
    threads = configuration.num_warps * gpu.warp_size
    registers, spills, shared, ptx, binary = (_amd_code if gpu.is_amd else _nvidia_code)(compiled)
    return MachineCode(gpu, registers, spills, shared, elements, threads, ptx, binary, configuration.block)


def compile_to_ttgir(kernel: Kernel, gpu: GPU, configuration: Configuration) -> str:
    """Return a kernel's TTGIR in one configuration: Triton's last form with tensors and layouts."""

    def stop_after_ttgir(*arguments: Any) -> Any:
        """Triton's hook: return strings for its caches' keys, or change the stages in ``arguments``."""
        if not arguments:
            return "", ""
        stages = arguments[1]
        for name in [*stages][2:]:
            stages[name] = lambda module, metadata: metadata.update(name="", shared=0) or ""

    runtime = import_triton("triton.knobs").runtime
    with mock.patch.object(runtime, "add_stages_inspection_hook", stop_after_ttgir):
        text: str = _compiled(kernel, gpu, configuration, "ttgir").asm["ttgir"]
    return text


def _compiled(kernel: Kernel, gpu: GPU, configuration: Configuration, cached_as: str = "") -> Any:
    """Compile a kernel. ``cached_as`` is added to its key in Triton's cache, which ignores hooks before Triton 3.7."""
    triton = import_triton()
    values = {**kernel.constants, **configuration.block}
    values = {name: value for name, value in values.items() if name in kernel.signature}
    ASTSource = import_triton("triton.compiler").ASTSource
    source = ASTSource(fn=kernel.jit, signature=dict(kernel.signature), constexprs=values, attrs=dict(kernel.attrs))
    digest = source.hash() + cached_as
    source.hash = lambda: digest
    options = {**kernel.options, "num_warps": configuration.num_warps}
    if configuration.num_stages is not None:
        options["num_stages"] = configuration.num_stages
    with described(gpu):
        return triton.compile(source, target=gpu.target(), options=options)


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
    """Return registers, spills, shared memory, PTX and the ELF file."""
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    usage = _nvidia_tool("cuobjdump", cubin, "-res-usage")
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return used["REG"], used["STACK"] + used["LOCAL"], compiled.metadata.shared, ptx, cubin


def _nvidia_tool(name: str, cubin: bytes, option: str) -> str:
    """Return the output of one of NVIDIA's tools, which Triton's wheel has, for an ELF file."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [getattr(import_triton("triton.knobs").nvidia, name).path, option, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _amd_code(compiled: Any) -> tuple[Any, ...]:
    """Return registers, spills, shared memory, an empty PTX, and the assembly."""
    asm = compiled.asm["amdgcn"]
    used = {name: int(value) for name, value in re.findall(r"^\s*-?\s*\.(\w+):\s+(\d+)\s*$", asm, re.M)}
    return used["vgpr_count"], 4 * used["vgpr_spill_count"], used["group_segment_fixed_size"], "", asm.encode()
