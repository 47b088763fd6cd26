"""The memory levels in eager mode, for a first linear, an activation and a second linear: x → h → a → result.

``torch.utils.checkpoint`` saves x (level "input"), h ("free") or h in float8 ("fp8"), and repeats the other calls in
backward. It stops at the last tensor that backward needs, which PyTorch's linear saves before its GEMM. So this GEMM
does not run again. Hooks, double backward, autocast and frozen weights work as in any checkpoint.
A checkpoint does not notice writes to parameters and to other tensors than its arguments. ``_Repeated`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torch_fused_ops.operators import fp8_store

Map = Callable[[Tensor], Tensor]
Named = Iterable[tuple[str, Tensor | None]]
_identity: Map = lambda t: t  # noqa: E731
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


class _Repeated:
    """A function that forward calls, and that backward calls again with forward's parameters.

    Backward may run after a ``functional_call`` around the module has ended, which restores other parameters. FSDP2's
    hooks gather parameters at every call, so its modules get no other parameters.
    """

    def __init__(self, fn: Callable[..., Tensor], module: nn.Module, reads: Named, unread: str) -> None:
        self.fn, self.module, self.is_again = fn, module, False
        self.parameters = dict(module.named_parameters())
        named = (*self.parameters.items(), *reads)
        tensors = [(name, t) for name, t in named if t is not None and unread not in name]
        self.versions = [(name, t, t._version) for name, t in tensors if not t.is_inference()]

    def __call__(self, *args: Tensor) -> Tensor:
        if not self.is_again:
            self.is_again = True
            return self.fn(*args)
        for name, t, version in self.versions:
            if t._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{name}, [{t.type()} {list(t.shape)}] is at version {t._version}; expected version {version} "
                    "instead. Backward recomputes from it: write it after backward"
                )
        is_same = [*map(id, self.module.parameters())] == [*map(id, self.parameters.values())]
        if is_same or any(hasattr(m, "set_requires_gradient_sync") for m in self.module.modules()):
            return self.fn(*args)
        with _reparametrize_module(self.module, self.parameters):  # type: ignore[arg-type]
            return self.fn(*args)


def run_at_level(
    module: nn.Module,
    x: Tensor,
    first: Map,
    activate: Map,
    second: Map,
    memory: str,
    *,
    stops_early: bool,
    reads: Named = (),
    saves_result: bool = False,
) -> Tensor:
    """Compute ``second(activate(first(x)))`` at a memory level, where h = first(x) and a = activate(h).

    Args:
        module: the module whose parameters the functions read.
        first, activate, second: ``first`` and ``activate`` must be deterministic, and may not write in place.
        memory: ``"off"`` saves h and a. ``"free"`` saves h and recomputes a. ``"fp8"`` saves h in float8_e4m3fn with a
            scale per row and recomputes both. ``"input"`` saves neither: backward runs ``first`` again.
        stops_early: True if ``second`` saves its last tensor before its GEMM, as PyTorch's linear does. Otherwise
            backward does not repeat ``second``, whose tensors stay saved, such as a or float8 values of a.
        reads: (name, tensor) for other tensors that the functions read. Backward raises if one was written.
        saves_result: True if ``activate`` saves only a.
    """
    reasons = (stops_early, not saves_result)
    gains = all(reasons) if memory == "free" else any(reasons)
    if memory == "off" or not gains or _bypasses_levels(x):
        return second(activate(first(x)))
    repeated, after = (second, _identity) if stops_early else (_identity, second)
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}

    def saving(fn: Callable[..., Tensor], *args: Tensor) -> Tensor:
        repeat = _Repeated(fn, module, reads, unread="fc2.bias" if stops_early else "fc2.")
        return after(torch.utils.checkpoint.checkpoint(repeat, *args, **settings))

    if memory == "input":
        return saving(lambda x: repeated(activate(first(x))), x)
    h = first(x)
    if memory == "free":
        return saving(lambda h: repeated(activate(h)), h)
    needs_grad, dtype, exact = h.requires_grad, h.dtype, [h]
    with torch.no_grad():
        stored, scale = fp8_store.store(h)
    del h

    def from_float8(stored: Tensor, scale: Tensor) -> Tensor:
        if exact:  # forward
            return repeated(activate(exact.pop()))
        with torch.no_grad():
            rounded = fp8_store.load(stored, scale, dtype)
        return repeated(activate(rounded.requires_grad_(needs_grad)))

    return saving(from_float8, stored, scale)
