"""The old name of ``torch_fused_ops.virtual_gpu``, for one version: the same modules, and a warning."""

import sys
import warnings

from torch_fused_ops import virtual_gpu
from torch_fused_ops.virtual_gpu import *  # noqa: F403

warnings.warn(
    f"{__name__} is now {virtual_gpu.__name__}; the old name goes with the next version",
    DeprecationWarning,
    stacklevel=2,
)
for _name, _module in list(sys.modules.items()):
    if _name.startswith(f"{virtual_gpu.__name__}."):
        sys.modules[__name__ + _name.removeprefix(virtual_gpu.__name__)] = _module
sys.modules[__name__] = virtual_gpu
