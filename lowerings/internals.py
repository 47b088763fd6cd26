"""The table of torch's private names that the fusion passes and lowerings use, and warnings if a name is missing.

``lowerings`` needs all names, on every version; ``compat.py`` probes for differences between versions. If a torch
lacks a name, usually because it is newer than the tested versions, the fusion passes warn and turn themselves off. Only
the eager operators remain. ``tests/anywhere/test_versions.py`` compares this table with the source files.
"""

from __future__ import annotations

import importlib
import re
import sys

TESTED = ((2, 11), (2, 15))
"""The first and the last torch version on which the whole test suite has passed."""

INTERNALS: dict[str, tuple[str, ...]] = {
    "torch": ("_TorchCompileInductorWrapper",),
    "torch._C._functorch": ("is_functorch_wrapped_tensor",),
    "torch._dynamo.code_context": ("code_context",),
    "torch._dynamo.config": ("caching_precompile", "compiled_autograd", "patch"),
    "torch._functorch._aot_autograd.descriptors": ("InputMutationAOTOutput",),
    "torch._functorch.config": ("activation_memory_budget", "donated_buffer", "patch"),
    "torch._functorch.partitioners": (
        "get_default_op_list",
        "min_cut_rematerialization_partition",
        "pointwise_ops",
    ),
    "torch._guards": ("CompileContext", "TracingContext"),
    "torch._inductor.choices": ("InductorChoices",),
    "torch._inductor.codegen.cpp": ("CppOverrides", "CppVecOverrides"),
    "torch._inductor.codegen.triton": ("FixedTritonConfig",),
    "torch._inductor.config": (
        "_post_fusion_custom_pass",
        "cpp_wrapper",
        "cuda_backend",
        "custom_partitioner_fn",
        "fallback_random",
        "freezing",
        "get_config_copy",
        "inplace_buffers",
        "max_autotune",
        "max_autotune_gemm",
        "memory_planning",
        "post_grad_custom_post_pass",
        "pre_grad_custom_pass",
        "split_reductions",
        "triton",
        "use_pre_grad_passes",
    ),
    "torch._inductor.custom_graph_pass": ("CustomGraphPass", "CustomPartitionerFn"),
    "torch._inductor.decomposition": ("select_decomp_table",),
    "torch._inductor.dependencies": ("MemoryDep", "WeakDep"),
    "torch._inductor.inductor_prims": ("seed",),
    "torch._inductor.ir": (
        "ComputedBuffer",
        "ConcatKernel",
        "DonatedBuffer",
        "ExternKernelOut",
        "FixedLayout",
        "FlexibleLayout",
        "MultiOutput",
        "NonOwningLayout",
        "Pointwise",
        "ReinterpretView",
        "StorageBox",
        "TensorBox",
        "ir_node_to_tensor",
    ),
    "torch._inductor.lowering": ("fallback_handler", "lowerings", "make_fallback", "register_lowering", "to_dtype"),
    "torch._inductor.pattern_matcher": ("stable_topological_sort",),
    "torch._inductor.runtime.hints": ("DeviceProperties",),
    "torch._inductor.scheduler": ("OutputNode",),
    "torch._inductor.subgraph_lowering": ("TracingOpsHandler",),
    "torch._inductor.utils": ("sympy_product",),
    "torch._inductor.virtualized": ("OpsValue", "V", "ops"),
    "torch._logging._internal": ("warning_once",),
    "torch._ops": ("HigherOrderOperator", "OpOverload", "OpOverloadPacket"),
    "torch._subclasses": ("FakeTensor",),
    "torch._subclasses.fake_tensor": ("FakeTensorMode", "unset_fake_temporarily"),
    "torch.compiler.config": ("cache_key_tag",),
    "torch.fx._lazy_graph_module": ("_make_graph_module",),
    "torch.utils._config_module": ("_UNSET_SENTINEL",),
    "torch.utils._pytree": ("tree_leaves", "tree_map_only"),
    "torch.utils._python_dispatch": ("_disable_current_modes",),
    "torch.utils._sympy.functions": ("FloorDiv",),
}


def missing(imported: bool = False) -> list[str]:
    """Return the table's names that this torch lacks; with ``imported``, only names of modules already imported."""
    lacking = []
    for module, names in INTERNALS.items():
        if imported and (module not in sys.modules or getattr(sys.modules[module].__spec__, "_initializing", False)):
            continue
        try:
            imported_module = importlib.import_module(module)
        except ImportError:
            lacking.append(module)
            continue
        lacking += [f"{module}.{name}" for name in names if not hasattr(imported_module, name)]
    return lacking


def is_newer(version: str) -> bool:
    """Return True if a torch version is newer than the tested ones."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2]) > TESTED[1]


def tested() -> str:
    """Return the tested torch versions, for messages."""
    first, last = (".".join(map(str, version)) for version in TESTED)
    return f"tested with torch {first} to {last}"
