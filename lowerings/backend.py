"""``torch.compile(model, backend="fused")``: Inductor with the fusion pass. An entry point registers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_fused_ops import lowerings
from torch_fused_ops.policy import FIELDS, FusionPolicy, not_known, policy_given

# torch.compile looks a backend up when it is called. It calls it when it compiles: not where it is served saved code.
if hasattr(lowerings.pick_up(), "reject_caching_precompile"):  # pick-up may be off
    lowerings.pick_up().reject_caching_precompile()


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
        mode: as for ``torch.compile``: "default", "reduce-overhead", "max-autotune", …
        options: Inductor options, as for ``torch.compile``, and ``"policy"``: a FusionPolicy; or its fields,
            ``{"memory": "fp8"}`` for ``{"policy": FusionPolicy(memory="fp8")}``. Without, the policy of ``enabled`` or
            ``enable`` holds where one is in force, else ``FusionPolicy()``.
    """
    passes = lowerings.pick_up()
    settings = dict(options or {})
    policy = _policy_of(settings) or passes.active_policy() or FusionPolicy()
    settings = passes.compile_options(policy, settings)
    # What ``torch.compile(mode=mode, options=options)`` compiles with: options checked, mode applied.
    compiler = getattr(torch, "_TorchCompileInductorWrapper", None)
    if compiler is not None:
        return compiler(mode, settings, None)(gm, example_inputs)  # type: ignore[no-any-return]
    inductor: Any = torch._dynamo.lookup_backend("inductor")
    return inductor(gm, example_inputs, config_patches=settings)  # type: ignore[no-any-return]


def _policy_of(settings: dict[str, Any]) -> FusionPolicy | None:
    """The policy in these options, taken out of them; None where there is none."""
    policy, fields = settings.pop("policy", None), {name: settings.pop(name) for name in FIELDS if name in settings}
    known = torch._inductor.config.get_config_copy() if settings else {}
    for name in settings:
        if name.replace("-", "_") not in known:
            raise TypeError(f"options: {not_known(name, ('policy', *FIELDS), known)}, or an option of Inductor's")
    return policy_given("options", policy, fields)
