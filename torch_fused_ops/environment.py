"""What the environment asks for: ``TORCH_FUSED_OPS="memory=fp8,gemm=fp8"`` is ``enable(FusionPolicy(...))``.

For programs whose text is not ours to change (``docs/integrations.md``). ``torch_fused_ops_autoload.py`` looks for it
as torch is imported; the policy is put in force as Inductor is, since importing that for its sake would cost 1.7 s.
"""

from __future__ import annotations

import os

from torch_fused_ops.policy import BOOLS, FusionPolicy

__all__ = ["NAME", "POLICY", "ask_for"]

NAME = "TORCH_FUSED_OPS"


def ask_for(text: str) -> None:
    """From here on the environment asks for this, in the processes that this one starts, too."""
    global POLICY
    os.environ[NAME] = text
    POLICY = _policy()


def _policy() -> FusionPolicy | None:
    text = os.environ.get(NAME, "").strip()
    if not text or BOOLS.get(text.lower()) is False:
        return None
    try:
        return FusionPolicy.parse(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the environment variable {NAME}={text!r} is not accepted: {error}") from None


POLICY = _policy()
