"""The memory levels in eager mode, for a first linear, an activation and a second linear.

Autograd saves their inputs, x, h and a. Backward can recompute h and a from x. So a saved-tensor hook
(``torch.autograd.graph.saved_tensors_hooks``) saves a recomputation instead of h or a. Autograd itself is unchanged:
hooks, double backward and frozen weights work. DTensors and other tensors that wrap tensors are saved as they are.

``torch.utils.checkpoint`` has no fp8 and is slower. On one core an MLP of 64×64×256 takes 508 µs per training step
without levels, 654 µs with this module, and 895 µs with checkpoint (torch 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass

from torch_fused_ops.operators import fp8_store

Map = Callable[[Tensor], Tensor]
Named = Callable[[], Iterable[tuple[str, Tensor | None]]]

Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
Key: TypeAlias = tuple[Any, ...]


def _outer_hooks() -> Hooks:
    """Return the enclosing saved-tensor hooks, such as a checkpoint's hooks. Autograd calls only the innermost pair."""
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks or (_Saved.from_tensor, _Saved.get)


def _versions(t: Tensor) -> tuple[int, ...]:
    """Return the versions of a tensor and of the tensors it wraps: a DTensor and its local tensor count separately."""
    names: Iterable[str] = t.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(t) else ()
    parts = (part for name in names if isinstance(part := getattr(t, name), Tensor))
    return (0 if t.is_inference() else t._version, *(count for part in parts for count in _versions(part)))


class _Saved(NamedTuple):
    """A tensor and its versions when it was saved. Autograd does not check versions of tensors that hooks replace."""

    tensor: Tensor
    versions: tuple[int, ...]

    @classmethod
    def from_tensor(cls, t: Tensor) -> _Saved:
        return cls(t, _versions(t))

    def is_unwritten(self) -> bool:
        return _versions(self.tensor) == self.versions

    def get(self, named: Named = tuple) -> Tensor:
        """Return the tensor. If it was written, raise a RuntimeError with its name, if ``named`` has the tensor."""
        t = self.tensor
        if not self.is_unwritten():
            key = _storage_key(t)
            names = [name for name, p in named() if p is not None and _storage_key(p) == key is not None]
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{', '.join([*names[:1], ''])}[{t.type()} {list(t.shape)}] is at version {sum(_versions(t))}; "
                f"expected version {sum(self.versions)} instead. Backward recomputes from it: write it after backward"
            )
        return t


def _hooks_accept_float8(hooks: Hooks) -> bool:
    """Return True for our hooks and torch's (checkpoint, ``save_on_cpu``), which return tensors unchanged.

    Other hooks may compute with the tensors, but float8 has no arithmetic.
    """
    pack: Any = hooks[0]
    while hasattr(pack, "outer"):  # our hooks: find the hooks around them
        pack = pack.outer
    module = getattr(pack, "__module__", None) or ""
    return module == __name__ or module.partition(".")[0] == "torch"


class _Recomputed:
    """A value that backward recomputes once for all of its uses, from saved tensors or another recomputed value."""

    def __init__(
        self, make: Callable[..., Tensor], *sources: _Saved | _Recomputed, reads: Iterable[_Saved] = ()
    ) -> None:
        self.make, self.sources, self.reads = make, sources, tuple(reads)
        self.packed: list[Any] = []
        self.pack, self.unpack = _outer_hooks()
        self.uses = self.uses_left = 0
        self.value: Tensor | None = None

    def saved(self) -> None:
        for source in self.sources:
            if isinstance(source, _Recomputed):
                source.saved()
                self.packed.append(source)
            else:
                self.packed.append(self.pack(source.tensor))
        self.sources = ()
        self.uses += 1

    def is_unwritten(self) -> bool:
        """Return True if no tensor that the recomputation reads was written."""
        return all(source.is_unwritten() for source in (*self.sources, *self.reads))

    def __call__(self) -> Tensor:
        if self.value is None:
            self.value = self.make(*(t() if isinstance(t, _Recomputed) else self.unpack(t) for t in self.packed))
            self.uses_left = self.uses
        value, self.uses_left = self.value, self.uses_left - 1
        if self.uses_left <= 0:
            self.value = None
        return value


class _RecomputeHandle(NamedTuple):
    """The object that autograd saves instead of a tensor: its recomputation and shape."""

    value: _Recomputed
    shape: torch.Size


def _storage_key(t: Tensor) -> Key | None:
    """Return a key of a tensor's elements: address and version. Return None if these do not identify the values.

    A tensor, its ``detach()`` and its full views have the same key. A write changes the key. Views of other elements or
    with another dtype have other keys. (As in autograd, writes through ``.data`` or by foreign code go unnoticed.)
    """
    if t.layout != torch.strided or t.is_nested or is_traceable_wrapper_subclass(t):
        return None
    if not t.is_contiguous() or t.is_neg() or t.is_conj():
        return None
    return (t.untyped_storage()._cdata, t.storage_offset(), t.numel(), t.dtype, *_versions(t))


@contextlib.contextmanager
def _recompute(value: Tensor, recomputed: _Recomputed | None, named: Named) -> Iterator[set[Key]]:
    """Inside the block, save ``recomputed``, unless it is None, instead of ``value``. Yield the saved tensors' keys.

    A tensor counts as ``value`` if it has its key. If an input of the recomputation was written, ``value`` is saved.
    """
    outer_pack, outer_unpack = _outer_hooks()
    key, keys = _storage_key(value), set[Key]()

    def pack(t: Tensor) -> Any:
        saved_key = _storage_key(t)
        if saved_key is None:
            return outer_pack(t)
        keys.add(saved_key)
        if saved_key != key or recomputed is None or not recomputed.is_unwritten():
            return outer_pack(t)
        recomputed.saved()
        return _RecomputeHandle(recomputed, t.shape)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, _Saved):
            return packed.get(named)
        return packed.value().view(packed.shape) if isinstance(packed, _RecomputeHandle) else outer_unpack(packed)

    pack.outer = outer_pack  # type: ignore[attr-defined]
    try:
        with saved_tensors_hooks(pack, unpack):
            yield keys
    finally:
        recomputed = None  # autograd holds ``pack`` until backward


class _Replay:
    """Repeats a call without gradients, under forward's autocast. Raises if tensors it reads were written."""

    def __init__(self, device: torch.device, named: Named) -> None:
        kind = device.type
        self.named = named
        self.reads = [_Saved.from_tensor(t) for _, t in named() if t is not None]
        self.autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            self.autocast = lambda: torch.autocast(kind, dtype)

    def __call__(self, fn: Map, x: Tensor) -> Tensor:
        for read in self.reads:
            read.get(self.named)
        with torch.no_grad(), self.autocast():
            return fn(x)


_SELECTIVE = (torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode)


def _bypasses_levels(x: Tensor) -> bool:
    """Return True if memory levels do not apply: a compiler or checkpoint decides, or hooks or gradients are off."""
    plain = torch.compiler.is_compiling() or not torch.is_grad_enabled()
    # Tensors in torch.func transforms, tensors with symbolic sizes and torch.fx's proxies do not own storage.
    plain = plain or torch._C._functorch.peek_interpreter_stack() is not None
    plain = plain or not isinstance(x, Tensor) or isinstance(x.numel(), torch.SymInt)
    plain = plain or not torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    # A selective checkpoint's policy decides; torch 2.15 warns or raises if a memory level is active inside it.
    return plain or any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


def run_at_level(
    x: Tensor,
    first: Map,
    activate: Map,
    second: Map,
    memory: str,
    reads: Named = tuple,
    may_draw: bool = False,
) -> Tensor:
    """Compute ``second(activate(first(x)))`` at a memory level, where h = first(x) and a = activate(h).

    Under ``torch.compile`` this is the plain composition, since the policy decides (``FusionPolicy.memory``).

    Args:
        first, activate, second: ``first`` must be deterministic, and ``activate`` too unless ``may_draw``. ``activate``
            saves only its input or its result. A result is not recomputed from an argument that its function overwrote.
        memory: ``"off"`` saves h and a. ``"free"`` saves h and recomputes a. ``"fp8"`` saves h in float8_e4m3fn with a
            scale per row and recomputes both. ``"input"`` saves neither: backward runs ``first`` again.
        reads: returns (name, tensor) for further tensors that ``first`` and ``activate`` read. If a tensor
            among them was written, backward raises.
        may_draw: True if ``activate`` is not ours and may draw random numbers. If it does, a is saved.
    """
    if memory == "off" or _bypasses_levels(x):
        return second(activate(first(x)))
    source = _Saved.from_tensor(x.detach())
    h = first(x)
    replay = _Replay(x.device, reads)
    original_h = _Saved.from_tensor(h)
    if memory == "input":
        recomputed_h = _Recomputed(lambda x: replay(first, x), source, reads=replay.reads)
    else:
        recomputed_h = _from_fp8(h) if memory == "fp8" else _Recomputed(_identity, _Saved.from_tensor(h.detach()))
    random = _random_states(x.device) if may_draw else []
    with _recompute(h, None if memory == "free" else recomputed_h, reads) as keys:
        a = activate(h)
    a_key = _storage_key(a)
    if a_key is None or a_key in keys:  # the activation saves its result, as ReLU
        return second(a)
    has_drawn = may_draw and not all(map(torch.equal, random, _random_states(x.device)))
    if has_drawn or not original_h.is_unwritten():  # the recomputed result would differ
        return second(a)
    recomputed_a = _Recomputed(lambda h: replay(activate, h), recomputed_h, reads=replay.reads)
    with _recompute(a, recomputed_a, reads):
        return second(a)


def _random_states(device: torch.device) -> list[Tensor]:
    """Return the states of the random number generators of the CPU and this device."""
    states = [torch.get_rng_state()]
    if device.type != "cpu" and hasattr(module := torch.get_device_module(device), "get_rng_state"):
        states.append(module.get_rng_state(device))
    return states


def _identity(t: Tensor) -> Tensor:
    return t


def _from_fp8(h: Tensor) -> _Recomputed:
    """Save h in float8 and dequantize it in backward. Outer hooks that cannot accept float8 get the dequantized h."""
    dtype = h.dtype
    with torch.no_grad():
        stored, scale = fp8_store.store(h)
        if not _hooks_accept_float8(_outer_hooks()):
            return _Recomputed(_identity, _Saved.from_tensor(fp8_store.load(stored, scale, dtype)))
    return _Recomputed(
        lambda stored, scale: fp8_store.load(stored, scale, dtype),
        _Saved.from_tensor(stored),
        _Saved.from_tensor(scale),
    )
