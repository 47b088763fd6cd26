"""Record which meta tensors `torch.zeros`, `torch.ones` and similar functions made.

Without this record, such a tensor looks like a result of `torch.empty`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_storages: dict[int, StorageWeakRef] = {}  # a weak reference prevents reuse of the storage's number


def known(tensor: Tensor) -> bool:
    """Return True if torch has filled a tensor's memory, in a factory on "meta" or in place."""
    return tensor._version > 0 or tensor.untyped_storage()._cdata in _storages


def _recorded(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    tensor = make(*args, **kwargs)
    if len(_storages) % 1024 == 1023:
        for number, reference in [*_storages.items()]:
            if reference.expired():
                del _storages[number]
    storage = tensor.untyped_storage()
    _storages[storage._cdata] = StorageWeakRef(storage)
    return tensor


# On "meta", these operators compute nothing. `torch.zeros_like` and `torch.ones_like` call the last two.
aten = torch.ops.aten
_EMPTY: dict[str, Callable[..., Tensor]] = {
    "zeros": aten.empty.memory_format,
    "ones": aten.empty.memory_format,
    "new_zeros": aten.new_empty.default,
    "new_ones": aten.new_empty.default,
    "zero_": lambda tensor: tensor,
    "fill_.Scalar": lambda tensor, _: tensor,
}
_library = torch.library.Library("aten", "IMPL")
for _name, _make in _EMPTY.items():
    _library.impl(
        _name, lambda *args, _make=_make, **kwargs: _recorded(_make, *args, **kwargs), "Meta", allow_override=True
    )
