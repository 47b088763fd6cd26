"""A virtual GPU: compile a program with Inductor and Triton for a GPU that is not present.

    compile_on_paper    Inductor's generated code, kernels, bytes moved and tensors saved for backward
    set_aside, compile_graph_on_paper    the same output for the graph of a compiler pass or a Dynamo backend
    assemble            machine code of a kernel: instructions, registers, spills
    interpret           run a kernel's arithmetic on CPU tensors
    interpret_step      run a whole program, forward and backward, on CPU tensors
    audit               races and wrong addresses

Only torch and Triton are needed; no device, driver or toolkit. `docs/virtual-gpu.md` has examples and limits.
"""

from torch_fused_ops.graphs.target import target_device

from .auditor import Audit, Finding, audit
from .captured import CapturedGraph, copy_graph, set_aside
from .compile import compile_graph_on_paper, compile_on_paper, compile_operator_on_paper
from .gpus import A10G, A100, B200, GB200, GB300, GPU, H100, H200, L40S, MI300X, RTX5090, RTXPRO6000, by_name, described
from .interpreter import interpret, interpret_step
from .machine_code import MachineCode, assemble
from .results import GeneratedGraph, GeneratedKernel, Launch, SavedTensor
from .timeline import PaperCompilation

__all__ = [
    "A10G",
    "A100",
    "B200",
    "GB200",
    "GB300",
    "GPU",
    "H100",
    "H200",
    "L40S",
    "MI300X",
    "RTX5090",
    "RTXPRO6000",
    "Audit",
    "CapturedGraph",
    "Finding",
    "GeneratedGraph",
    "GeneratedKernel",
    "Launch",
    "MachineCode",
    "PaperCompilation",
    "SavedTensor",
    "assemble",
    "audit",
    "by_name",
    "compile_graph_on_paper",
    "compile_on_paper",
    "compile_operator_on_paper",
    "copy_graph",
    "described",
    "interpret",
    "interpret_step",
    "set_aside",
    "target_device",
]
