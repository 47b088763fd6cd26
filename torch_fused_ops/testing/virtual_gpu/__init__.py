"""A GPU on paper: see what Inductor and Triton make of a program for a GPU that is not there.

    compile_on_paper    Inductor's generated code, kernels, bytes moved and tensors saved for backward
    assemble            machine code of a kernel: instructions, registers, spills
    interpret           a kernel's real arithmetic, on CPU tensors

Only torch and Triton are needed; no device, driver or toolkit. `docs/virtual-gpu.md` has examples and limits.
"""

from .gpus import A100, B200, GPU, H100, H200, MI300X, by_name, described
from .interpreter import interpret
from .machine_code import MachineCode, assemble
from .paper import GeneratedGraph, GeneratedKernel, PaperCompilation, SavedTensor, compile_on_paper

__all__ = [
    "A100",
    "B200",
    "GPU",
    "H100",
    "H200",
    "MI300X",
    "GeneratedGraph",
    "GeneratedKernel",
    "MachineCode",
    "PaperCompilation",
    "SavedTensor",
    "assemble",
    "by_name",
    "compile_on_paper",
    "described",
    "interpret",
]
