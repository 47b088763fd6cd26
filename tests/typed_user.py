"""A user's file, which `.ci/types` checks: only lines with an ignore have errors."""

import torch
from torch import Tensor
from typing_extensions import assert_type

import torch_fused_ops as tfo
from torch_fused_ops import functional as FF
from torch_fused_ops import ops

compiled = torch.compile(torch.nn.Linear(8, 8), backend="fused", options={"memory": "fp8"})  # pyright: ignore[reportUnknownMemberType]  # fmt: skip
x = torch.ones(2, 8)
assert_type(FF.bias_act(x, activation="gelu_tanh"), Tensor)
assert_type(FF.swiglu(x, x, clamp=7.0, memory="fp8"), Tensor)
FF.bias_geglu(x, layout="swapped", clmp=7.0)  # type: ignore[call-arg]
assert_type(tfo.ops.glu(x, x, None, "silu", clamp=7.0), Tensor)  # torch.ops.fused.glu has no types
assert_type(ops.quantize(x, 128), tuple[Tensor, Tensor])
tfo.ops.glu(x, x, "silu")  # type: ignore[call-arg,arg-type]
tfo.ops.gluu  # type: ignore[attr-defined]  # noqa: B018
mlp: torch.nn.Module = tfo.nn.FusedMLP(8, 16)
tfo.enable(memory="fp8", exclude=["encoder.*"])
tfo.enable(memory={"layers.0.*": "input", "*": "tiled:6"}, gemm="fp8-rowwise")
tfo.enable(tfo.FusionPolicy(memory="tiled:16"))
with tfo.enabled(strict=True):
    options: dict[str, object] = tfo.compile_options(memory="input")
tfo.enable(memroy="fp8")  # type: ignore[call-arg]
tfo.enable(memory="fp9")  # type: ignore[arg-type]
tfo.FusionPolicy(gemm="fp8-rows")  # type: ignore[arg-type]
tfo.no_such_part  # type: ignore[attr-defined]  # noqa: B018
report: tfo.Report = tfo.explain(mlp, x)
sites: tuple[tfo.Site, ...] = report.sites
