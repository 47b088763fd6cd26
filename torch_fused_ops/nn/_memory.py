"""What eager autograd keeps of a first linear, an activation and a second linear: the memory levels without a compiler.

Run one after the other, the first linear keeps x, the activation its input h, the second linear its input a. Two of
these are functions of what is kept besides. ``torch.autograd.graph.saved_tensors_hooks`` swaps a tensor, as it is
saved, for how to make it again: autograd itself is as it was, so hooks, double backward, DTensors and frozen weights
work as without.

``torch.utils.checkpoint`` could do it too, but for fp8; on one core a training step of an MLP of 64×64×256 takes 508 µs
plain, 654 so, and 895 with checkpoint (torch 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass

from torch_fused_ops import reference, tiles

__all__ = ["in_tiles", "through"]

Map = Callable[[Tensor], Tensor]


Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def _outer_hooks() -> Hooks:
    """The saved-tensor hooks around us (a checkpoint's, an offloader's): what we keep is theirs to keep.

    Of nested hooks autograd calls the innermost pair alone.
    """
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks or (_Kept.of, _Kept.get)


def _inner(t: Tensor) -> list[Tensor]:
    """The tensors that a wrapper subclass wraps: a DTensor's local one, which is not its mesh."""
    if not is_traceable_wrapper_subclass(t):
        return []
    parts = (getattr(t, name) for name in t.__tensor_flatten__()[0])
    return [part for part in parts if isinstance(part, Tensor)]


def _versions(t: Tensor) -> tuple[int, ...]:
    """The counts of writes to a tensor and to what it wraps: a write to a DTensor does not count for its local one."""
    version = 0 if t.is_inference() else t._version
    return (version, *(count for part in _inner(t) for count in _versions(part)))


class _Kept(NamedTuple):
    """A tensor and how often it was written. Autograd itself does not look at what goes through hooks."""

    tensor: Tensor
    versions: tuple[int, ...]

    @classmethod
    def of(cls, t: Tensor) -> _Kept:
        return cls(t, _versions(t))

    def is_unwritten(self) -> bool:
        return _versions(self.tensor) == self.versions

    def get(self) -> Tensor:
        t = self.tensor
        if not self.is_unwritten():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{t.type()} {list(t.shape)}] is at version {sum(_versions(t))}; expected version "
                f"{sum(self.versions)} instead"
            )
        return t


def _hooks(h: Tensor, offload: bool) -> Hooks:
    """Where what we keep goes: to the CPU, if asked for, but for hooks around us."""
    if not offload or torch._C._autograd._top_saved_tensors_default_hooks(True):
        return _outer_hooks()
    to_cpu = save_on_cpu(pin_memory=h.is_cuda)
    return to_cpu.pack_hook, to_cpu.unpack_hook


def _take_any_dtype(hooks: Hooks) -> bool:
    """Whether the hooks are ours or torch's (a checkpoint's, ``save_on_cpu``), which give back what they get.

    A user's may compute: float8 has no arithmetic, and its bits as integers are no numbers.
    """
    pack: Any = hooks[0]
    while hasattr(pack, "outer"):  # a module's in another's, which hand on what they get
        pack = pack.outer
    module = getattr(pack, "__module__", None) or ""
    return module == __name__ or module.partition(".")[0] == "torch"


class _Remade:
    """A value that backward makes again, from tensors kept for it or from another such value, once for all savers."""

    def __init__(
        self,
        make: Callable[..., Tensor],
        *sources: _Kept | _Remade,
        hooks: Hooks | None = None,
        reads: Iterable[_Kept] = (),
    ) -> None:
        self.make, self.sources, self.reads = make, sources, tuple(reads)
        self.kept: list[Any] = []
        self.pack, self.unpack = hooks or _outer_hooks()
        self.savers = self.left = 0
        self.value: Tensor | None = None

    def saved(self) -> None:
        if self.savers == 0:
            for source in self.sources:
                if isinstance(source, _Remade):
                    source.saved()
                    self.kept.append(source)
                else:
                    self.kept.append(self.pack(source.tensor))
            self.sources = ()
        self.savers += 1

    def is_unwritten(self) -> bool:
        """Whether all that the value is made of is still what it was made of."""
        return all(source.is_unwritten() for source in (*self.sources, *self.reads))

    def __call__(self) -> Tensor:
        if self.value is None:
            self.value = self.make(*(one() if isinstance(one, _Remade) else self.unpack(one) for one in self.kept))
            self.left = self.savers
        value, self.left = self.value, self.left - 1
        if self.left <= 0:
            self.value = None
        return value


class _Recipe(NamedTuple):
    """Saved in a tensor's place."""

    value: _Remade
    shape: torch.Size
    placed: tuple[Any, ...] | None = None  # of a DTensor made of the value: its local shape, mesh, placements, stride

    @classmethod
    def of(cls, value: _Remade, saved: Any) -> _Recipe:
        if not hasattr(saved, "device_mesh"):
            return cls(value, saved.shape)
        place = saved.to_local().shape, saved.device_mesh, saved.placements, saved.stride()
        return cls(value, saved.shape, place)

    def get(self) -> Tensor:
        value = self.value()
        value = value.to_local() if hasattr(value, "device_mesh") else value  # type: ignore[attr-defined]
        if self.placed is None:
            return value.view(self.shape)
        from torch.distributed.tensor import DTensor

        local, mesh, placements, stride = self.placed
        return DTensor.from_local(value.view(local), mesh, placements, run_check=False, shape=self.shape, stride=stride)


def _elements_of(t: Tensor) -> tuple[Any, ...] | None:
    """The elements' place in memory and how often it was written; None where that does not tell their values.

    It is the same for a tensor, its detached twin, its views of all of it, and a DTensor whose local tensor it is; not
    for views of other elements or another dtype, nor for any of these once one was written. (Autograd does not notice
    writes through ``.data`` or by foreign code, and nor does this.)
    """
    if hasattr(t, "device_mesh"):
        (local,) = _inner(t)
        elements, version = _elements_of(local), _versions(t)[0]
        return elements if elements is None or version == 0 else (*elements, version)
    if t.layout != torch.strided or t.is_nested or is_traceable_wrapper_subclass(t):
        return None
    if not t.is_contiguous() or t.is_neg() or t.is_conj():
        return None
    return (t.untyped_storage()._cdata, t.storage_offset(), t.numel(), t.dtype, *_versions(t))


Values: TypeAlias = dict[tuple[Any, ...] | None, tuple[_Kept, _Remade]]


@contextlib.contextmanager
def _instead_of(values: Values, found: Callable[[Tensor], _Remade | None] | None = None) -> Iterator[None]:
    """Inside, whatever saves one of the values for backward saves how it is made again; so does what is ``found``.

    A value is told by ``_elements_of``, and only as long as neither it nor what it is made of is written.
    """
    outer_pack, outer_unpack = _outer_hooks()

    def pack(saved: Tensor) -> Any:
        elements = _elements_of(saved)
        if elements is None:
            return outer_pack(saved)
        if elements not in values and found is not None and (new := found(saved)) is not None:
            values[elements] = _Kept.of(saved), new
        if elements not in values:
            return outer_pack(saved)
        value, remade = values[elements]
        if not (value.is_unwritten() and remade.is_unwritten()):
            return outer_pack(saved)
        remade.saved()
        return _Recipe.of(remade, saved)

    def unpack(kept: Any) -> Tensor:
        return kept.get() if isinstance(kept, _Recipe) else outer_unpack(kept)

    pack.outer = outer_pack  # type: ignore[attr-defined]
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        values.clear()  # autograd holds ``pack`` until backward


@contextlib.contextmanager
def _watch(seen: set[tuple[Any, ...] | None]) -> Iterator[None]:
    """Inside, note whose memory is saved for backward."""

    outer_pack, outer_unpack = _outer_hooks()

    def pack(saved: Tensor) -> Any:
        seen.add(_elements_of(saved))
        return outer_pack(saved)

    pack.outer = outer_pack  # type: ignore[attr-defined]
    with saved_tensors_hooks(pack, outer_unpack):
        yield


class _Again:
    """A function as it was called: without gradients, under the autocast that was in force, on the same numbers."""

    def __init__(self, device: torch.device, reads: Iterable[Tensor | None]) -> None:
        kind = device.type
        self.reads = [_Kept.of(t) for t in reads if t is not None]
        self.autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            self.autocast = lambda: torch.autocast(kind, dtype)

    def __call__(self, fn: Map, x: Tensor) -> Tensor:
        for kept in self.reads:
            kept.get()
        with torch.no_grad(), self.autocast():
            return fn(x)


_SELECTIVE = (torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode)


def _in_selective_checkpoint() -> bool:
    """Whether a selective checkpoint's policy decides what is kept, in its forward pass or its repetition.

    With a level inside, torch 2.15 warns, and raises where the checkpoint is to respect hooks.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


def _is_plain(x: Tensor) -> bool:
    """Whether no level is for this call: nothing is kept, somebody else decides, or there is nothing to hook into."""
    plain = torch.compiler.is_compiling() or not torch.is_grad_enabled()
    # A torch.func transform's tensors have no memory of their own, nor have those with symbolic sizes and torch.fx's
    # proxies; torch.jit.trace traces again without gradients, and compares. Where hooks are disabled there is no level.
    plain = plain or torch._C._functorch.peek_interpreter_stack() is not None or torch._C._is_tracing()
    plain = plain or not isinstance(x, Tensor) or isinstance(x.numel(), torch.SymInt)
    plain = plain or not torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return plain or _in_selective_checkpoint()


def in_tiles(x: Tensor, memory: str, run: Callable[[Tensor, str], Tensor]) -> Tensor:
    """``run(x, memory)``; at the level "tiled" of one tile of x's rows after the other, each at the level "input".

    Args:
        x: (..., n)
        memory: a level.
        run: what to compute, each row of one row: ``through`` at the level that it is handed. It is called once a tile.
    """
    asked = tiles.asked(memory)
    if asked is None:
        return run(x, memory)
    # A DTensor's rows are shared out, and what is computed of them may communicate.
    count = 1 if _is_plain(x) or hasattr(x, "device_mesh") else tiles.number(x.shape[:-1].numel(), asked)
    if count == 1:
        return run(x, "input")
    rows = x.reshape(-1, x.shape[-1])
    each, last = tiles.lengths(rows.shape[0], count)
    results = [run(piece, "input") for piece in rows.split([each] * (count - 1) + [last])]
    return torch.cat(results).view(*x.shape[:-1], results[0].shape[-1])


def through(
    x: Tensor,
    first: Map,
    activate: Map,
    second: Map,
    memory: str,
    offload: bool = False,
    reads: Callable[[], Iterable[Tensor | None]] = tuple,
    may_draw: bool = False,
) -> Tensor:
    """``second(activate(first(x)))``, keeping what ``memory`` says between them.

    Under ``torch.compile`` the policy decides (``FusionPolicy.memory``), and this is the plain composition.

    Args:
        first, activate, second: ``first`` and ``activate`` deterministic; ``activate`` keeps no more than its input, or
            its result instead. Where one of them writes to its argument, what it wrote over is not made again.
        memory: ``"off"`` h and a; ``"free"`` h, from which a is made again; ``"fp8"`` h in float8_e4m3fn with a scale
            for each row, from which both are; ``"input"`` neither: ``first`` runs again in backward.
        offload: keep it in the CPU's memory.
        reads: what ``first`` and ``activate`` read besides their argument; written before backward makes something
            again, it raises.
        may_draw: ``activate`` is not ours and may draw random numbers. If it does, its result is kept.
    """
    if _is_plain(x) or (memory == "off" and not offload):
        return second(activate(first(x)))
    source = _Kept.of(x.detach())
    h = first(x)
    again, hooks = _Again(x.device, reads()), _hooks(h, offload)
    remade = _LEVELS[memory](source, h, first, again, hooks)
    hidden, of_h = _Kept.of(h), _elements_of(h)
    values: Values = {of_h: (hidden, remade)}
    seen = set[tuple[Any, ...] | None]()

    def large(saved: Tensor) -> _Remade | None:
        """Of what the activation keeps besides, its result, as ReLU, but no bias and no scale."""
        return None if 2 * saved.numel() < h.numel() else _Remade(_same, _Kept.of(saved.detach()), hooks=hooks)

    random = _random_states(x.device) if may_draw else []
    with _watch(seen) if memory == "free" and not offload else _instead_of(values, large if offload else None):
        a = activate(h)
        of_a = _elements_of(a)
        _, result = values.get(of_a, (None, None))
    # As ReLU, it keeps its result; or it is the identity.
    if of_a is None or of_a in seen or (of_a == of_h and not offload):
        return second(a)
    if result is None:
        drawn = may_draw and not all(map(torch.equal, random, _random_states(x.device)))
        if memory != "off" and hidden.is_unwritten() and not drawn:
            result = _Remade(lambda h: again(activate, h), remade, reads=again.reads)
        elif offload:
            result = _Remade(_same, _Kept.of(a.detach()), hooks=hooks)
        else:  # it works in place, or draws: again it would give something else
            return second(a)
    with _instead_of({of_a: (_Kept.of(a), result)}):
        return second(a)


def _random_states(device: torch.device) -> list[Tensor]:
    """The states of the generators that code for this device draws from."""
    states = [torch.get_rng_state()]
    if device.type != "cpu" and hasattr(module := torch.get_device_module(device), "get_rng_state"):
        states.append(module.get_rng_state(device))
    return states


def _same(t: Tensor) -> Tensor:
    return t


def _free(x: _Kept, h: Tensor, first: Map, again: _Again, hooks: Hooks) -> _Remade:
    return _Remade(_same, _Kept.of(h.detach()), hooks=hooks)


def _fp8(x: _Kept, h: Tensor, first: Map, again: _Again, hooks: Hooks) -> _Remade:
    dtype = h.dtype
    with torch.no_grad():
        stored, scale = reference.store_fp8(h)
        if not _take_any_dtype(hooks):
            return _Remade(_same, _Kept.of(reference.load_fp8(stored, scale, dtype)), hooks=hooks)
    return _Remade(
        lambda stored, scale: reference.load_fp8(stored, scale, dtype), _Kept.of(stored), _Kept.of(scale), hooks=hooks
    )


def _input(x: _Kept, h: Tensor, first: Map, again: _Again, hooks: Hooks) -> _Remade:
    return _Remade(lambda x: again(first, x), x, reads=again.reads)


_LEVELS: dict[str, Callable[[_Kept, Tensor, Map, _Again, Hooks], _Remade]] = {
    "off": _free,
    "free": _free,
    "fp8": _fp8,
    "input": _input,
}
