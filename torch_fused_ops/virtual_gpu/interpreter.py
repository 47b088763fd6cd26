"""Run kernels on CPU tensors in Triton's interpreter: the arithmetic of the GPU code, without the GPU."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from .gpus import import_triton
from .kernels import Kernel, load, written_sizes
from .wrapper import called

if TYPE_CHECKING:
    from .results import GeneratedGraph, GraphInput
    from .timeline import PaperCompilation

# Elements that one program of an automatic grid handles: NumPy is fast on large arrays, and Triton's limit is 2**20.
PROGRAM_ELEMENTS = 1 << 16

# Inductor's launch grids that follow from sizes and block sizes alone.
SIMPLE_GRIDS = ("Grid1D", "Grid2D", "Grid2DWithYZOverflow", "Grid3D")


def interpret(
    kernel: Any, *args: Any, grid: Sequence[int] | Callable[..., Sequence[int]] | None = None, **constexprs: Any
) -> None:
    """Run a kernel on CPU tensors, in place, in Triton's interpreter.

    The interpreter is Triton's own, with four things added: device functions (`libdevice.tanh`) computed in float64
    and rounded, float32 to bfloat16 and to float8 rounded to nearest even, `TRITON_INTERPRET` not needed, and its
    patches of Triton undone. It is not safe to use from several threads at once.

    Args:
        kernel: a `GeneratedKernel`, or a hand-written `triton.jit` function.
        *args: its arguments in order, tensors on the CPU. Sizes (xnumel, r0_numel) at the end of a generated kernel's
            arguments may be left out where they are constants in its source.
        grid: programs to launch, as for Triton; needed for hand-written kernels. By default a generated kernel's block
            sizes are chosen, and the grid that covers its sizes.
        **constexprs: block sizes and other `tl.constexpr` arguments by name.

    Raises:
        ModuleNotFoundError: when Triton or NumPy is not installed.
        TypeError: when `kernel` is not a kernel, or the arguments do not fit.
        ValueError: when a tensor is not on the CPU, or `grid` is missing and does not follow from the sizes.
    """
    loaded = load(kernel)
    for name, value in zip(loaded.jit.arg_names, args, strict=False):
        if isinstance(value, Tensor) and value.device.type != "cpu":
            raise ValueError(f"{name}: got a tensor on {value.device}, expected one on the CPU")
    named = {**dict(zip(loaded.jit.arg_names, args, strict=False)), **constexprs}
    if len(args) > len(loaded.jit.arg_names):
        raise TypeError(f"args: got {len(args)}, expected at most {len(loaded.jit.arg_names)}: {loaded.jit.arg_names}")
    if loaded.signature:
        passed = {name: size for name, size in written_sizes(loaded.jit.src).items() if name in loaded.jit.arg_names}
        named = {**passed, **loaded.constants, **named}
    if grid is None:
        named, grid = _automatic_grid(loaded, named)
    parameters = loaded.jit.signature.parameters.items()
    missing = [name for name, parameter in parameters if name not in named and parameter.default is parameter.empty]
    if missing:
        raise TypeError(f"args: no value for {', '.join(missing)} of {loaded.jit.__name__}")
    interpreter = import_triton("triton.runtime.interpreter")
    with _interpreting():
        function = _rewritten(loaded.jit)
        launch = grid if callable(grid) else tuple(grid)
        interpreter.GridExecutor(function, loaded.jit.arg_names, launch)(**named)


def interpret_step(
    paper: PaperCompilation, inputs: Sequence[Any], gradients: Sequence[Tensor] = ()
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Run Inductor's generated code of a program, forward and backward, on CPU tensors; kernels as `interpret` does.

    The generated module itself runs: its allocations, reuse, in-place writes and saved tensors are those on the GPU.
    Library calls (`extern_kernels.mm`) and operators that it calls are torch's on the CPU.

    Args:
        paper: the compilation of a program without dynamic sizes.
        inputs: in the order of `paper.forward.inputs`, or `paper.inference.inputs`, which have Dynamo's names for them.
            They are copied only where their strides differ.
        gradients: for the results whose number is in `paper.tangents`, in that order. Empty: backward does not run.

    Returns:
        The results, and the inputs' gradients in their order, None for an input without one; () without backward.

    Raises:
        ModuleNotFoundError: when Triton or NumPy is not installed.
        TypeError: for an input or a gradient that is not a tensor, or has another dtype.
        ValueError: for another number of them, other shapes, or tensors that are not on the CPU.
        NotImplementedError, RuntimeError: from torch, for a call that the CPU has no kernel for.
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
    """Arguments as the generated code expects them, with the strides that it was generated for."""
    if isinstance(values, Tensor) or len(values) != len(specs):
        got = "a tensor" if isinstance(values, Tensor) else len(values)
        raise ValueError(f"{name}: got {got}, expected a sequence of {len(specs)}")
    arguments = []
    for i, (value, spec) in enumerate(zip(values, specs, strict=True)):
        if spec.number is not None:
            arguments.append(value)
            continue
        which = f"{name}[{i}]" + (f" ({spec.name})" if spec.name else "")
        if not isinstance(value, Tensor) or value.dtype != spec.dtype:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{which}: got {kind}, expected a tensor of {spec.dtype}")
        if value.device.type != "cpu":
            raise ValueError(f"{which}: got a tensor on {value.device}, expected one on the CPU")
        if tuple(value.shape) != spec.shape:
            raise ValueError(f"{which}: got shape {tuple(value.shape)}, expected {spec.shape}")
        if value.stride() != spec.stride:
            value = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype).copy_(value.detach())
        arguments.append(value)
    return arguments


def _run(graph: GeneratedGraph, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a generated graph."""
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


def _automatic_grid(kernel: Kernel, named: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Block sizes and the grid that covers a generated kernel's sizes. Larger blocks need masks that Inductor omits."""
    from torch._inductor.runtime.hints import TRITON_MAX_BLOCK

    grid_type = kernel.inductor_meta.get("grid_type")
    if grid_type not in SIMPLE_GRIDS:
        launched = f"launched as {grid_type}" if grid_type else "hand-written"
        raise ValueError(f"grid: missing, and {kernel.jit.__name__} is {launched}")
    named, grid, room = dict(named), [], PROGRAM_ELEMENTS
    power_above = import_triton().next_power_of_2
    axes = [axis for axis in ("r0_", "r1_", "x", "y", "z") if f"{axis}numel" in kernel.jit.arg_names]
    for axis in axes:
        size, block = named.get(f"{axis}numel"), f"{axis.upper()}BLOCK"
        if size is None:
            raise TypeError(f"args: no value for {axis}numel of {kernel.jit.__name__}")
        if block in kernel.jit.arg_names:
            largest = TRITON_MAX_BLOCK[axis.upper()]
            named.setdefault(block, min(power_above(max(1, size)), max(1, room), largest))
            if named[block] > largest or named[block] & (named[block] - 1):
                raise ValueError(f"{block}: got {named[block]}, expected a power of 2 up to {largest}")
        room //= named.get(block, power_above(max(1, size)))
        if not axis.startswith("r"):
            grid.append(-(-size // named.get(block, 1)))
    return named, tuple(grid)


def _rewritten(jit: Any) -> Any:
    """The function of a kernel or of a device function in the form that the interpreter runs.

    It has a copy of the function's globals as they are now, since Triton's rewriter adds names to them.
    """
    interpreter = import_triton("triton.runtime.interpreter")
    namespace = {**vars(interpreter), **jit.fn.__globals__}
    libdevice = {id(original): replacement for original, replacement in _libdevice_functions()}
    namespace.update({name: libdevice[id(value)] for name, value in namespace.items() if id(value) in libdevice})
    code = _rewritten_code.get(jit.fn)
    if code is None:
        copy = _with_code(jit.fn, jit.fn.__code__, namespace)
        code = _rewritten_code[jit.fn] = interpreter.FunctionRewriter(copy).rewrite_ast().__code__
    return _with_code(jit.fn, code, namespace)


# Triton's rewriter reads and parses a function's source at each call: for small tensors, 2/5 of the interpreter's time.
_rewritten_code: weakref.WeakKeyDictionary[Callable[..., Any], types.CodeType] = weakref.WeakKeyDictionary()


def _with_code(function: Any, code: types.CodeType, namespace: dict[str, Any]) -> Any:
    closure = function.__closure__ if code.co_freevars else None
    copy = types.FunctionType(code, namespace, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    return copy


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """Give Triton's language the interpreter's meaning; restore its own on leaving."""
    import_triton("numpy")
    import_triton("triton.compiler.code_generator")  # takes min and max of the language as it is imported
    tl = import_triton("triton.language")
    interpreter = import_triton("triton.runtime.interpreter")
    jit = import_triton("triton.runtime.jit")
    rewritten: dict[int, Any] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A device function, called from an interpreted one."""
        if id(self) not in rewritten:
            rewritten[id(self)] = _rewritten(self)
        return rewritten[id(self)](*args, **kwargs)

    builder, patched = interpreter.InterpreterBuilder, types.SimpleNamespace(restore=lambda: None)
    replacements: list[tuple[Any, str, Any]] = [
        # Triton would patch again for each function, and undo only some patches.
        (interpreter, "_patch_lang", lambda function: patched),
        # Triton 3.6 calls int() on an array with one element, which NumPy 2 refuses.
        (tl.core.tensor, "__index__", lambda self: int(self.handle.data.squeeze())),
        (interpreter.ReduceOps, "generic_reduce", _reduce),
        (jit.JITFunction, "__call__", call),
        (builder, "cast_impl", _cast),
        (builder, "create_fp_to_fp", functools.partialmethod(_narrow, builder.create_fp_to_fp)),
        *((import_triton(f.__module__), f.__name__, replacement) for f, replacement in _libdevice_functions()),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(_delete_new_attributes, tl.core.tensor, frozenset(vars(tl.core.tensor)))
        # Triton patches the modules of its language that it finds in a function's globals.
        stack.callback(interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})).restore)
        for replacement in replacements:
            stack.enter_context(mock.patch.object(*replacement))
        yield


def _delete_new_attributes(owner: type, names: frozenset[str]) -> None:
    """Delete attributes that Triton has restored as the class's own although they are inherited."""
    for name in set(vars(owner)) - names:
        delattr(owner, name)


def _reduce(reduction: Any, inputs: Any) -> Any:
    """A reduction with a function of the kernel's own, by halves as on a GPU; Triton's takes one element at a time."""
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
    """Conversion between element types, with bfloat16 as the hardware does it: rounded to nearest, ties to even.

    Triton 3.6 to 3.9 truncate float32 to bfloat16, which leaves half of all values one unit low, and take the bits of
    a bfloat16, an integer to NumPy, for its value where the other type is not float32.
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
    """Conversion to float8 as GPUs do it: rounded to nearest, ties to even, saturated at the largest number.

    Triton 3.6 to 3.9 lose the carry of rounding into the exponent (1.97 becomes 1) and round ties up.
    """
    import numpy as np

    target = _FLOAT8.get(str(target_type.scalar))
    if target is None or source.data.dtype != np.float32:
        return otherwise(builder, source, target_type, rounding_mode)
    largest = torch.finfo(target).max
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).clamp(-largest, largest).to(target)
    interpreter = import_triton("triton.runtime.interpreter")
    return interpreter.TensorHandle(rounded.view(torch.uint8).numpy(), target_type.scalar)


# Device functions by name, over float64: those that torch calls the same, and the others.
_OF_TORCH = (
    "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor fmax fmin "
    "fmod hypot isinf isnan lgamma log log10 log1p log2 nextafter pow rsqrt signbit sin sinh sqrt tan tanh trunc"
)
_DEVICE_FUNCTIONS: dict[str, Callable[..., Tensor]] = {name: getattr(torch, name) for name in _OF_TORCH.split()} | {
    "abs": torch.abs,
    "cbrt": lambda x: torch.copysign(x.abs().pow(1 / 3), x),
    "fabs": torch.abs,
    "fma": lambda x, y, z: x * y + z,
    "fdim": lambda x, y: (x - y).clamp(min=0),
    "finitef": torch.isfinite,
    "isfinited": torch.isfinite,
    "div_rn": torch.div,
    "fast_dividef": torch.div,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "nearbyint": torch.round,
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "rint": torch.round,
    "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1,
}


@functools.cache
def _libdevice_functions() -> list[tuple[Any, Any]]:
    """Triton's device functions, which only a compiler can resolve, with functions that the interpreter can call."""
    replacements = []
    for module in ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice"):
        library = import_triton(module)
        for name, function in _DEVICE_FUNCTIONS.items():
            if hasattr(library, name):
                replacements.append((getattr(library, name), functools.partial(_device_function, function)))
    return replacements


def _device_function(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    """`function` on interpreted values: in float64, rounded to their type."""
    tl = import_triton("triton.language")
    interpreter = import_triton("triton.runtime.interpreter")
    values = [interpreter.interpreter_semantic.to_tensor(arg) for arg in args]
    result = function(*(torch.from_numpy(value.handle.data).double() for value in values))
    first = max(values, key=lambda value: value.handle.data.size)
    element = tl.int32 if result.dtype == torch.bool else first.type.scalar
    data = result.numpy().astype(interpreter._get_np_dtype(element))
    kind = tl.block_type(element, list(data.shape)) if first.type.is_block() else element
    return tl.tensor(interpreter.TensorHandle(data, element), kind)
