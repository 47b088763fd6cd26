"""Run GPU kernels on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from .gpus import import_triton
from .kernels import Kernel, launch_grid, load
from .wrapper import called

if TYPE_CHECKING:
    from .results import GeneratedGraph, GraphInput
    from .timeline import PaperCompilation

# Elements per program in an automatic grid: NumPy is fast on large arrays, and Triton's limit is 2**20.
PROGRAM_ELEMENTS = 1 << 16


def interpret(
    kernel: Any, *args: Any, grid: Sequence[int] | Callable[..., Sequence[int]] | None = None, **constexprs: Any
) -> None:
    """Run a kernel on CPU tensors, in place, in Triton's interpreter.

    `TRITON_INTERPRET` need not be set. Device functions (`libdevice.tanh`) compute in float64 and round; conversions
    to bfloat16 and float8 round to nearest even. On return, Triton's patches of its language are undone.
    Not thread-safe.

    Args:
        kernel: a `GeneratedKernel`, or a hand-written `triton.jit` function.
        *args: its arguments in order, tensors on the CPU. Sizes (xnumel, r0_numel) at the end of a generated kernel's
            arguments may be omitted if they are constants in its source.
        grid: programs to launch, as for Triton; required for hand-written kernels. By default, a generated kernel gets
            large blocks and Inductor's grid for them.
        **constexprs: block sizes and other `tl.constexpr` arguments by name.

    Raises:
        ModuleNotFoundError: Triton or NumPy is not installed.
        TypeError: `kernel` is not a kernel, or the arguments do not fit.
        ValueError: a tensor is not on the CPU, or `grid` is missing and does not follow from the sizes.
    """
    loaded = load(kernel)
    names = loaded.jit.arg_names
    if len(args) > len(names):
        raise TypeError(f"args: got {len(args)}, expected at most {len(names)}: {names}")
    named = {**dict(zip(names, args, strict=False)), **constexprs}
    for name, value in named.items():
        if isinstance(value, Tensor) and value.device.type != "cpu":
            raise ValueError(f"{name}: got a tensor on {value.device}, expected one on the CPU")
    if loaded.signature:
        written = re.findall(r"^    (\w+numel) = (\d+)$", loaded.jit.src, re.M)  # by Inductor: "xnumel = 512"
        sizes = {name: int(size) for name, size in written if name in names}
        named = {**sizes, **loaded.constants, **named}
    if grid is None:
        if not loaded.inductor_meta:
            raise ValueError(f"grid: missing, and {loaded.jit.__name__} is hand-written")
        named |= _large_blocks(loaded, named)
        blocks = {name: named[name] for name in loaded.configurations[0].block}
        grid = launch_grid(loaded, named, replace(loaded.configurations[0], block=blocks))
    with _interpreting() as rewritten:
        function = rewritten(loaded.jit.fn)
        launch = grid if callable(grid) else tuple(grid)
        import_triton("triton.runtime.interpreter").GridExecutor(function, names, launch)(**named)


def interpret_step(
    paper: PaperCompilation, inputs: Sequence[Any], gradients: Sequence[Tensor] = ()
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Run a program's generated code, forward and backward, on CPU tensors; kernels run in the interpreter.

    The generated module itself runs, with its allocations, buffer reuse, in-place writes and saved tensors. Library
    calls (`extern_kernels.mm`) and operators run on the CPU.

    Args:
        paper: the compilation of a program without dynamic sizes.
        inputs: the arguments in the order of `paper.forward.inputs` or `paper.inference.inputs`, which record Dynamo's
            names. An input whose strides differ from the compiled strides is copied.
        gradients: gradients of the results that `paper.tangents` numbers, in its order. If empty, backward does not
            run.

    Returns:
        The results, and the inputs' gradients: None for an input without a gradient, () if backward does not run.

    Raises:
        ModuleNotFoundError: Triton or NumPy is not installed.
        ValueError: the number of inputs or gradients, a shape or a dtype does not fit.
        NotImplementedError, RuntimeError: from torch, for a call that has no CPU kernel.
    """
    forward = paper.forward or paper.inference
    assert forward is not None
    outputs = _run(forward, _as_compiled("inputs", inputs, forward.inputs))
    results = tuple(outputs[: forward.results])
    if not gradients:
        return results, ()
    if paper.backward is None:
        raise ValueError(f"gradients: got {len(gradients)}, expected none: the program was compiled for inference")
    specs = [spec for spec, number in zip(paper.backward.inputs, paper.handed, strict=True) if number is None]
    tangents = iter(_as_compiled("gradients", gradients, specs))
    arguments = [next(tangents) if number is None else outputs[number] for number in paper.handed]
    del outputs
    return results, tuple(_run(paper.backward, arguments))


def _as_compiled(name: str, values: Sequence[Any], specs: Sequence[GraphInput]) -> list[Any]:
    """Check a graph's arguments, and copy those whose strides differ from the compiled ones."""
    if len(values) != len(specs):
        raise ValueError(f"{name}: got {len(values)}, expected {len(specs)}")
    arguments = []
    for i, (value, spec) in enumerate(zip(values, specs, strict=True)):
        if spec.number is None:
            if (value.dtype, tuple(value.shape)) != (spec.dtype, spec.shape):
                got, expected = f"{value.dtype}{list(value.shape)}", f"{spec.dtype}{list(spec.shape)}"
                raise ValueError(f"{name}[{i}] ({spec.name}): got {got}, expected {expected}")
            if value.stride() != spec.stride:
                value = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype).copy_(value.detach())
        arguments.append(value)
    return arguments


def _run(graph: GeneratedGraph, inputs: Sequence[Any]) -> list[Any]:
    """Run a generated graph, and return its outputs."""
    from torch._inductor.select_algorithm import extern_kernels

    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    kernels = {kernel.name: kernel for kernel in graph.kernels}
    names = ("empty_strided_cuda", "empty_strided_cpu", "empty_strided_cpu_pinned")
    stand_ins = {**dict.fromkeys(names, empty_strided), "extern_kernels": extern_kernels}

    def kernel(name: str, source: str) -> Any:
        return types.SimpleNamespace(run=lambda *args, **options: interpret(kernels[name], *args))

    with torch.no_grad():
        return list(called(graph.code, stand_ins, kernel)(list(inputs)))


def _large_blocks(kernel: Kernel, named: Mapping[str, Any]) -> dict[str, int]:
    """Return a generated kernel's block sizes: those in ``named``, and otherwise large ones, so that few programs run.

    Blocks above Inductor's largest would need masks that its code omits.
    """
    from torch._inductor.runtime.hints import TRITON_MAX_BLOCK

    blocks, elements_left = {}, PROGRAM_ELEMENTS
    for axis in ("r0_", "r1_", "x", "y", "z"):
        if f"{axis}numel" in kernel.jit.arg_names:
            if f"{axis}numel" not in named:
                raise TypeError(f"args: no value for {axis}numel of {kernel.jit.__name__}")
            size = import_triton().next_power_of_2(max(1, named[f"{axis}numel"]))
            if (block := f"{axis.upper()}BLOCK") in kernel.jit.arg_names:
                largest = TRITON_MAX_BLOCK[axis.upper()]
                size = blocks[block] = named.get(block, min(size, max(1, elements_left), largest))
                if size > largest or size & (size - 1):
                    raise ValueError(f"{block}: got {size}, expected a power of 2 up to {largest}")
            elements_left //= size
    return blocks


@contextlib.contextmanager
def _interpreting() -> Iterator[Callable[[Any], Any]]:
    """Switch Triton's language to the interpreter until exit. Yield a function that rewrites kernels for it."""
    import_triton("numpy")
    import_triton("triton.compiler.code_generator")  # its import copies the language's min and max, so it comes first
    tl = import_triton("triton.language")
    interpreter = import_triton("triton.runtime.interpreter")
    jit = import_triton("triton.runtime.jit")
    libdevice = {id(original): replacement for original, replacement in _libdevice_functions()}

    @functools.cache
    def rewritten(function: Any) -> Any:
        """Rewrite a kernel or a device function. The result is cached, because rewriting parses the source."""
        names = function.__globals__
        for name, value in [*names.items()]:
            if id(value) in libdevice:
                stack.callback(names.__setitem__, name, value)
                names[name] = libdevice[id(value)]
        return interpreter.InterpretedFunction(function).rewrite()

    builder, patched = interpreter.InterpreterBuilder, types.SimpleNamespace(restore=lambda: None)
    replacements: list[tuple[Any, str, Any]] = [
        # Triton would patch again for each function, and undo only some patches.
        (interpreter, "_patch_lang", lambda function: patched),
        # Triton 3.6 calls int() on an array with one element, which NumPy 2 refuses.
        (tl.core.tensor, "__index__", lambda self: int(self.handle.data.squeeze())),
        (interpreter.ReduceOps, "generic_reduce", _reduce),
        (jit.JITFunction, "__call__", lambda self, *args, **kwargs: rewritten(self.fn)(*args, **kwargs)),
        (builder, "cast_impl", _cast),
        (builder, "create_fp_to_fp", functools.partialmethod(_narrow, builder.create_fp_to_fp)),
        *((import_triton(f.__module__), f.__name__, replacement) for f, replacement in _libdevice_functions()),
    ]
    with contextlib.ExitStack() as stack:
        # Triton patches the modules of its language that it finds in a function's globals.
        stack.callback(interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})).restore)
        for replacement in replacements:
            stack.enter_context(mock.patch.object(*replacement))
        yield rewritten


def _reduce(reduction: Any, inputs: Any) -> Any:
    """Reduce with a kernel's combine function, by halves as on a GPU. Triton's version loops over elements."""
    import numpy as np

    values, dtypes = [value.handle.data for value in inputs], [value.dtype for value in inputs]
    dims, axis = values[0].ndim, reduction.axis
    if axis is None:
        values, axis = [value.reshape(-1) for value in values], 0
    axis %= values[0].ndim
    while values[0].shape[axis] > 1:
        halves = [np.split(value, 2, axis) for value in values]
        tensors = [
            reduction.to_tensor(half[side], dtype)
            for side in (0, 1)
            for half, dtype in zip(halves, dtypes, strict=True)
        ]
        combined = reduction.combine_fn(*tensors)
        combined = combined if isinstance(combined, tuple) else (combined,)
        values = [value.handle.data for value in combined]
    if not reduction.keep_dims:
        values = [value.squeeze(axis) for value in values]
    elif reduction.axis is None:
        values = [value.reshape((1,) * dims) for value in values]
    return [reduction.to_tensor(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]


def _cast(builder: Any, source: Any, target_type: Any) -> Any:
    """Convert between element types. Float32 rounds to bfloat16 as in hardware: to nearest, ties to even.

    Triton 3.6 to 3.9 truncate float32 to bfloat16, so that half of all values are one unit low. They also use the bits
    of a bfloat16 (an integer in NumPy) as its value unless the other type is float32.
    """
    import numpy as np

    tl = import_triton("triton.language")
    interpreter = import_triton("triton.runtime.interpreter")
    target = target_type.scalar
    data = source.data
    if source.dtype.scalar == tl.bfloat16:
        data = (data.astype(np.uint32) << 16).view(np.float32)
    if target == tl.bfloat16:
        rounded = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), target)
    return interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(target_type)), target)


_FLOAT8 = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}


def _narrow(builder: Any, otherwise: Any, source: Any, target_type: Any, rounding_mode: Any) -> Any:
    """Convert to float8 as GPUs do: to nearest, ties to even, saturated at the largest number.

    Triton 3.6 to 3.9 lose a carry into the exponent (1.97 becomes 1), and round ties up.
    """
    import numpy as np

    target = _FLOAT8.get(str(target_type.scalar))
    if target is None or source.data.dtype != np.float32:
        return otherwise(builder, source, target_type, rounding_mode)
    largest = torch.finfo(target).max
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).clamp(-largest, largest).to(target)
    interpreter = import_triton("triton.runtime.interpreter")
    return interpreter.TensorHandle(rounded.view(torch.uint8).numpy(), target_type.scalar)


# Device functions in float64: first the names that torch also has, then the remaining names.
_OF_TORCH = (
    "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor fmax fmin "
    "fmod hypot isinf isnan lgamma log log10 log1p log2 nextafter pow rsqrt signbit sin sinh sqrt tan tanh trunc"
)
_DEVICE_FUNCTIONS: dict[str, Callable[..., Tensor]] = {name: getattr(torch, name) for name in _OF_TORCH.split()} | {
    "abs": torch.abs,
    "fabs": torch.abs,
    "fma": lambda x, y, z: x * y + z,
    "div_rn": torch.div,
    "fast_dividef": torch.div,
    "nearbyint": torch.round,
    "rint": torch.round,
}


@functools.cache
def _libdevice_functions() -> list[tuple[Any, Any]]:
    """Pair Triton's device functions, which only its compiler can resolve, with functions for the interpreter."""
    replacements = []
    for module in ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice"):
        library = import_triton(module)
        for name, function in _DEVICE_FUNCTIONS.items():
            if hasattr(library, name):
                replacements.append((getattr(library, name), functools.partial(_device_function, function)))
    return replacements


def _device_function(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    """Apply `function` to interpreted values in float64, and round to their type."""
    tl = import_triton("triton.language")
    interpreter = import_triton("triton.runtime.interpreter")
    values = [interpreter.interpreter_semantic.to_tensor(arg) for arg in args]
    result = function(*(torch.from_numpy(value.handle.data).double() for value in values))
    first = max(values, key=lambda value: value.handle.data.size)
    element = tl.int32 if result.dtype == torch.bool else first.type.scalar
    data = result.numpy().astype(interpreter._get_np_dtype(element))
    kind = tl.block_type(element, list(data.shape)) if first.type.is_block() else element
    return tl.tensor(interpreter.TensorHandle(data, element), kind)
