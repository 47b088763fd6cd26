"""``torch.ops.fused`` under a name that type checkers know: ``ops.pyi`` has the operators' signatures.

``torch_fused_ops.ops`` is that object itself. ``docs/generate.py`` writes the signatures from the schemas.
"""

import sys

import torch

sys.modules[__name__] = torch.ops.fused
