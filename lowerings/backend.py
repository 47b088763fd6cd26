"""``torch.compile(model, backend="fused")``: Inductor with the fusion pass. An entry point registers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_fused_ops import lowerings
from torch_fused_ops.policy import FIELDS, FusionPolicy, not_known, policy_given

# torch.compile imports this module when it is called. It calls the backend only to compile, not for cached code.
if hasattr(lowerings.load_passes(), "reject_unsupported"):  # ``disabled`` does not have it
    lowerings.load_passes().reject_unsupported()


def fused(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a captured graph with Inductor, with its MLPs fused.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its inputs, fake or real.
        mode: the mode of ``torch.compile``: "default", "reduce-overhead", "max-autotune", …
        options: Inductor options, and ``"policy"``: a FusionPolicy. Its fields are options as well: ``{"memory":
            "fp8"}`` means ``{"policy": FusionPolicy(memory="fp8")}``. The default is the policy of ``enabled`` or
            ``enable`` if it is active, otherwise ``FusionPolicy()``.
    """
    passes = lowerings.load_passes()
    settings = dict(options or {})
    policy = _policy_of(settings) or passes.active_policy() or FusionPolicy()
    settings = passes.compile_options(policy, settings)
    # torch.compile's own wrapper checks the options and applies the mode.
    compiler = torch._TorchCompileInductorWrapper(mode, settings, None)
    return compiler(gm, example_inputs)  # type: ignore[no-any-return]


def _policy_of(settings: dict[str, Any]) -> FusionPolicy | None:
    """Remove the policy from these options and return it; None if they have no policy."""
    policy, fields = settings.pop("policy", None), {name: settings.pop(name) for name in FIELDS if name in settings}
    known = torch._inductor.config.get_config_copy() if settings else {}
    for name in settings:
        if name.replace("-", "_") not in known:
            raise TypeError(f"options: {not_known(name, ('policy', *FIELDS), known)}, or an Inductor option")
    return policy_given("options", policy, fields)
