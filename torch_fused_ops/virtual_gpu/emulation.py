"""Emulate a GPU on CPU tensors while a program is captured.

Capture runs on fake CPU tensors, because a CPU build of torch has no CUDA device guard, and aborts in autograd on fake
CUDA tensors. The patches in this module remove the differences between programs captured on the two devices: autocast
lists, decompositions that depend on the device, and attention kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from torch_fused_ops.graphs.target import emulated

from .gpus import GPU, described

aten = torch.ops.aten


@contextlib.contextmanager
def patched_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Patch `owner.name` with `wrapper`, which receives the original as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    with mock.patch.object(owner, name, wrapped):
        yield


@contextlib.contextmanager
def kernels_registered(kernels: Mapping[Any, Callable[..., Any]], key: str) -> Iterator[None]:
    """Register operators' kernels for a dispatch key, and clear Python's cache of keys with kernels."""
    torch_library: Any = torch.library
    with contextlib.ExitStack() as stack:
        libraries = {name: torch_library.Library(name, "IMPL") for name in {op.namespace for op in kernels}}
        for op, kernel in kernels.items():
            libraries[op.namespace].impl(op, kernel, key)
            op._dispatch_cache.clear()
            stack.callback(op._dispatch_cache.clear)
        for library in libraries.values():
            stack.callback(library._destroy)
        yield


@contextlib.contextmanager
def emulating(gpu: GPU) -> Iterator[None]:
    """Emulate a GPU: torch describes it as present, and it is the target device of CPU tensors."""
    with described(gpu):
        token = emulated.set(torch.device("cuda", 0))
        try:
            yield
        finally:
            emulated.reset(token)


# CUDA autocast's lists AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE in ATen/autocast_mode.h. The CPU's lists differ:
# pow and softmax, for example, stay in bfloat16. Both devices have the same list of GEMMs.
FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm "
    "logsumexp"
)
FLOAT32_RESULT = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Give CPU tensors CUDA's autocast: its state, its lists, and operators' Python kernels."""
    state = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def mirror() -> None:
        torch.set_autocast_enabled("cpu", torch.is_autocast_enabled("cuda"))
        torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))

    def mirrored(original: Callable[..., Any], *args: Any) -> Any:
        result = original(*args)
        mirror()
        return result

    kernels: dict[Any, Callable[..., Any]] = {}
    for names, kernel in ((FLOAT32, _float32_kernel), (FLOAT32_RESULT, _float32_result_kernel)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                continue  # the operator is in the CPU's list as well
            op = getattr(getattr(aten, packet), overload or "default")
            kernels[op] = functools.partial(kernel, op)
    for full_name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        op = torch._library.utils.lookup_op(full_name)
        cuda_kernel = op.py_kernels.get(torch._C.DispatchKey.AutocastCUDA)
        if cuda_kernel is not None and not torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "AutocastCPU"):
            kernels[op] = _without_autocast()(cuda_kernel)
    autocast = torch.amp.autocast_mode.autocast
    with (
        kernels_registered(kernels, "AutocastCPU"),
        patched_method(autocast, "__enter__", mirrored),
        patched_method(autocast, "__exit__", mirrored),
    ):
        try:
            mirror()
            yield
        finally:
            torch.set_autocast_enabled("cpu", state[0])
            torch.set_autocast_dtype("cpu", state[1])


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        yield


def _is_low_precision(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


@_without_autocast()
def _float32_kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply autocast's policy fp32: cast arguments to float32."""
    cast = functools.partial(tree_map, lambda value: value.float() if _is_low_precision(value) else value)
    return op(*cast(args), **cast(kwargs))


@_without_autocast()
def _float32_result_kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply autocast's policy fp32_set_opt_dtype: default to `dtype=float32`."""
    position = [argument.name for argument in op._schema.arguments].index("dtype")
    dtype = kwargs.get("dtype") if len(args) <= position else args[position]
    if dtype is None and (_is_low_precision(args[0]) or args[0].dtype == torch.float32):
        args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
    return op(*args, **kwargs)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions. Device-dependent decompositions take the GPU's branch."""
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    for product in (aten.mm.default, aten.addmm.default, aten.bmm.default):
        table.pop(product, None)  # the CPU's decomposition computes very small products without a GEMM
    layer_norm = table.get(aten.native_layer_norm.default)
    if layer_norm is not None:
        table[aten.native_layer_norm.default] = functools.partial(_native_layer_norm, layer_norm)
    return table


def _native_layer_norm(
    original: Callable[..., Any], input: Tensor, normalized_shape: Any, weight: Any, bias: Any, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute layer norm with mean and reciprocal deviation in float32. On the CPU, both have the input's dtype."""
    from torch._refs import _normalize

    dims = list(range(input.dim() - len(normalized_shape), input.dim()))
    _, mean, rstd = _normalize(input, dims, eps)
    return original(input, normalized_shape, weight, bias, eps)[0], mean, rstd


def cuda_attention() -> contextlib.AbstractContextManager[None]:
    """Make `scaled_dot_product_attention` choose among CUDA's kernels for CPU tensors, by CUDA's conditions."""
    return kernels_registered({aten.scaled_dot_product_attention.default: _attention}, "AutogradCPU")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Choose attention by the rules of `sdp_utils.cpp` and `attention.cpp`, without cuDNN: flash, efficient or math."""
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    half = query.dtype in (torch.bfloat16, torch.float16)
    width, *widths = (tensor.size(-1) for tensor in (query, key, value))
    heads = {tensor.shape[:2] for tensor in (query, key, value)}
    plain = query.dim() == 4 and 0 not in (query.size(-2), key.size(-2)) and widths[0] == width
    strided = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    fits_heads = len(heads) == 1 or enable_gqa
    flash = plain and strided and half and mask is None and widths[1] == width <= 256 and fits_heads
    if flash and torch.cuda.get_device_capability() >= (8, 0) and not (is_causal and query.size(-2) != key.size(-2)):
        padded = (F.pad(tensor, (0, -width % 8)) if width % 8 else tensor for tensor in (query, key, value))
        scale = width**-0.5 if scale is None else scale
        outputs = aten._scaled_dot_product_flash_attention.default(*padded, dropout_p, is_causal, False, scale=scale)
        return outputs[0][..., :width]  # type: ignore[no-any-return]
    alignment = 8 if half else 4
    if (
        plain
        and strided
        and len(heads) == 1
        and query.dtype != torch.float64
        and not any(size % alignment for size in (width, widths[1]))
    ):
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        bias = None if mask is None else _aligned(mask).expand(*query.shape[:3], key.size(2))
        efficient = aten._scaled_dot_product_efficient_attention.default
        outputs = efficient(query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale)
        return outputs[0]  # type: ignore[no-any-return]
    math = aten._scaled_dot_product_attention_math.default
    outputs = math(query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)
    return outputs[0]  # type: ignore[no-any-return]


def _aligned(mask: Tensor) -> Tensor:
    """Pad a mask's rows in memory as the efficient kernel requires."""
    if mask.stride(-1) == 1 and not any(stride % 16 for stride in mask.stride()[:-1]):
        return mask
    size = mask.size(-1)
    return F.pad(mask, (0, 16 - size % 16))[..., :size]


@contextlib.contextmanager
def cuda_rules() -> Iterator[None]:
    """Make shape functions that depend on the device treat fake CPU tensors as CUDA tensors (`histc` of integers)."""
    from torch import _meta_registrations
    from torch._subclasses.fake_tensor import FakeTensorMode

    def device_hint(original: Callable[..., str], tensor: Any) -> str:
        return original(tensor).replace("cpu", "cuda")

    with patched_method(_meta_registrations, "device_hint", device_hint), contextlib.ExitStack() as stack:
        stack.callback(FakeTensorMode.cache_clear)  # cached results of shape functions depend on the device
        FakeTensorMode.cache_clear()
        yield


@contextlib.contextmanager
def guardless_tensors() -> Iterator[None]:
    """Patch methods of fake CUDA tensors that enter a device guard.

    The few methods that torch binds by hand enter a guard before they dispatch. A guard fails on a CPU build of torch,
    and initializes a real device on other builds.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    methods: dict[str, Any] = {
        "__getitem__": _getitem,
        "__invert__": lambda self: aten.bitwise_not.default(self),
        "contiguous": lambda self, memory_format=torch.contiguous_format: aten.contiguous.default(
            self, memory_format=memory_format
        ),
        "copy_": lambda self, source, non_blocking=False: aten.copy_.default(self, source, non_blocking),
    }
    with mock.patch.multiple(FakeTensor, **methods):
        yield


class _ConstantsOnCPU(TorchDispatchMode):
    """Mode that allocates real tensors on the CPU when the GPU is requested."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cpu = torch.device("cpu")
        on_cpu = functools.partial(tree_map, lambda value: cpu if isinstance(value, torch.device) else value)
        return func(*on_cpu(args), **on_cpu(kwargs or {}))


@contextlib.contextmanager
def constants_folded_on_cpu() -> Iterator[None]:
    """Make Inductor fold uniform constants (real tensors of one element) on the CPU instead of the GPU."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    def on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _ConstantsOnCPU():  # type: ignore[no-untyped-call]
            return original(*args, **kwargs)

    folder = UniformValueConstantFolder
    with patched_method(folder, "__init__", on_cpu), patched_method(folder, "run", on_cpu):
        yield


@contextlib.contextmanager
def patterns_traced_on_cpu() -> Iterator[None]:
    """Make Inductor trace the training graphs of its patterns, such as attention, on the CPU, and move them to the GPU.

    Autograd ends the process if it meets a tensor on a device for which torch was not built.
    """
    from torch._functorch.partitioners import default_partition
    from torch._inductor import pattern_matcher

    def aot_function(original: Callable[..., Any], *args: Any, partition_fn: Any, **settings: Any) -> Any:
        def partition(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
            on_gpu_graph = pattern_matcher.clone_graph(graph)
            move_graph(on_gpu_graph)
            partition_fn(on_gpu_graph, inputs, **kwargs)  # records the pattern's graph
            return default_partition(graph, inputs, **kwargs)

        traced = original(*args, partition_fn=partition, **settings)
        return lambda *tensors: traced(*map(functools.partial(moved, "cpu"), tensors))

    with patched_method(pattern_matcher, "aot_function", aot_function):
        yield


def _getitem(tensor: Tensor, index: Any) -> Tensor:
    """Compute `tensor[index]` with the operators that torch uses for it."""
    entries = list(index) if isinstance(index, tuple) else [index]
    entries = [torch.tensor(e, device=tensor.device) if isinstance(e, list) else e for e in entries]
    consumed = sum(_dims_consumed(entry) for entry in entries)
    tensors: dict[int, Tensor] = {}
    dim = 0
    for entry in entries:
        if entry is None:
            tensor, dim = aten.unsqueeze.default(tensor, dim), dim + 1
        elif entry is Ellipsis:
            added = sum(entry is None for entry in entries[: entries.index(Ellipsis)])
            dim = dim + tensor.dim() - added - consumed
        elif isinstance(entry, slice):
            tensor, dim = aten.slice.Tensor(tensor, dim, entry.start, entry.stop, entry.step or 1), dim + 1
        elif isinstance(entry, Tensor):
            tensors[dim], dim = entry, dim + _dims_consumed(entry)
        else:
            tensor, consumed = aten.select.int(tensor, dim, entry), consumed - 1
    if tensors:
        tensor = aten.index.Tensor(tensor, [tensors.get(dim) for dim in range(max(tensors) + 1)])
    return tensor


def _dims_consumed(entry: Any) -> int:
    if entry is None or entry is Ellipsis:
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1


def moved(device: str, value: Any) -> Any:
    """Return a fake tensor like ``value`` on "cpu" or "cuda"; return values other than fake tensors unchanged."""
    if not isinstance(value, torch._subclasses.FakeTensor) or value.device.type == device:
        return value
    with value.fake_mode:
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return copy.requires_grad_() if value.requires_grad and device == "cpu" else copy


def is_host_copy(node: fx.Node) -> bool:
    """Return True for backward's input that is a host copy of a saved tensor (``FusionPolicy(offload=…)``)."""
    return any(getattr(user.target, "namespace", "") == "ao" for user in node.users)


def move_graph(gm: fx.GraphModule) -> None:
    """Move a traced graph from the CPU to the GPU: its inputs, device arguments, and recorded values."""
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    gpu = torch.device("cuda", 0)

    def renamed(value: Any) -> Any:
        return gpu if isinstance(value, torch.device) and value.type == "cpu" else value

    for node in gm.graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default):
        # A constant such as `torch.tensor([1.0], device=…)` is lifted on the CPU.
        with gm.graph.inserting_after(node):
            copy = gm.graph.call_function(torch.ops.prims.device_put.default, (node, gpu))
        copy.meta.update(node.meta)
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    inputs = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = tree_map(functools.partial(moved, "cuda"), node.meta.get("val"))
            inputs.append(node.meta["val"])
        node.args, node.kwargs = fx.node.map_aggregate(node.args, renamed), fx.node.map_aggregate(node.kwargs, renamed)
        node.meta.pop("tensor_meta", None)
    gm.recompile()
    with torch.no_grad():
        FakeTensorProp(gm, mode=V.fake_mode).propagate_dont_convert_inputs(*inputs)
