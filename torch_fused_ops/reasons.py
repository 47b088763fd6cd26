"""Why something is left as it is, as data: every kind of reason, and what helps, each in one place.

A refusal is raised with its kind and its text, ``Refusal(Kind.MASK, "a mask takes part: gt")``. The text is for people.
Whatever goes on from there (whether a site counts as an MLP, whether ``strict`` asks for it, which hint a report gives,
what ``replace_mlps`` tries next) reads the kind: texts may be reworded. ``python docs/generate.py`` writes the tables
of docs/recognition.md from the kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import NamedTuple

__all__ = ["CAN_BE_ADDED", "NOT_AN_MLP", "Family", "Kind", "Reason", "Refusal", "excluded"]

NOT_AN_MLP = "not an MLP: "  # in front of the texts of what no policy counts as a miss
CAN_BE_ADDED = " (register_activation can add it)"  # behind a text, for where no hint is shown


class Family(Enum):
    """Kinds that the page has in one table: its heading, and what stands before it."""

    NOT_AN_MLP = ("Not an MLP", "`strict` does not count these.")
    FUNCTION = ("Another function", "")
    SOUNDNESS = ("Replacing it would change something", "")
    CHOICE = ("You, or Inductor", "")
    MODULE = (
        "Modules that replace_mlps leaves alone",
        "For any of the reasons above, or because the module is not exactly linear layers around an activation. In a "
        "module of many linear layers the report says first where the activation stands.",
    )
    GEMM = (
        "Linear layers that stay in the model's dtype",
        'Of `gemm="fp8"`. They stand behind the site of their activation.',
    )
    TILES = (
        "MLPs that are not cut into tiles",
        'Of `memory="tiled"`. They stand behind the site of their activation. Of such an MLP its input is kept, as '
        'with `"input"`. It may be for a reason of the tables above, too: something is written in place, or a product '
        "is no linear layer.",
    )
    MEMORY = (
        "Tensors that a memory level leaves as they are",
        'Of `memory="fp8"` and `"input"`, in the log (`torch_fused_ops`, level INFO).',
    )
    CAPTURE = (
        "Graph breaks",
        "Where Dynamo ends a graph and begins another. A site does not reach across one. They stand below the sites.",
    )

    @property
    def title(self) -> str:
        return self.value[0]

    @property
    def introduction(self) -> str:
        return self.value[1]


@dataclass(frozen=True)
class _Declared:
    """A kind, declared.

    Attributes:
        family: the table that it stands in.
        texts: what the report says, one or several forms; in *italics* stands what differs from model to model.
        means: what that means, in Markdown.
        cure: what its reader can do about it, in plain words; "" where there is nothing to do.
        wanted: the user has asked for it: ``strict`` does not count it.
    """

    family: Family
    texts: tuple[str, ...]
    means: str = ""
    cure: str = ""
    wanted: bool = False


_REGISTER = (
    'If it is meant so, torch_fused_ops.register_activation("name", fn) adds it, fn being this function of one '
    "tensor; then it is proved and fused."
)
_OUT_OF_PLACE = "Write the operation that works in place out of place."


# What TILE_CALLERS and MADE_OF_CALLERS mean, and what helps.
_OF_CALLERS = (
    "An argument or a result of the graph, which PyTorch does not keep: the first weight is frozen.",
    "Compile what is in front of it in the same graph: what the graph makes for itself can be kept.",
)


@unique
class Kind(Enum):
    """The kinds of reasons. Their names are what JSON has as a site's ``kind``."""

    # ---- not an MLP --------------------------------------------------------------------------------------------------
    OTHER_OPERAND = _Declared(
        Family.NOT_AN_MLP,
        (f"{NOT_AN_MLP}combined with the result of *op*, which no GEMM with weights has produced",),
        "A gate on something else: an attention's output, a norm, a recurrent state. An MLP's operands all come from "
        "GEMMs with weights.",
    )
    COMPUTED_PRODUCT = _Declared(
        Family.NOT_AN_MLP,
        (f"{NOT_AN_MLP}read by a product of two computed tensors, as in attention",),
        "The GEMM has no weights.",
    )
    CONSTANT = _Declared(
        Family.NOT_AN_MLP,
        (f"{NOT_AN_MLP}it is *0* everywhere",),
        "A gate on something that is constant in this graph, such as a recurrent state that starts as zeros.",
    )
    NO_GEMM_READS = _Declared(
        Family.NOT_AN_MLP,
        (f"{NOT_AN_MLP}no GEMM reads it, but *op*",),
        "Listed under the sites, as *activation* is no site: an activation at the end of a model, or in front of a "
        "norm. Nothing is saved twice there.",
    )
    NO_GEMM_BEFORE = _Declared(
        Family.NOT_AN_MLP,
        (f"{NOT_AN_MLP}it reads *op*, which no GEMM with weights has produced",),
        "Likewise: a convolution, a norm or an operator of another library stands in front of it, or a graph break.",
    )
    OPAQUE = _Declared(
        Family.NOT_AN_MLP,
        (
            f"{NOT_AN_MLP}*F* stands between matrix products, and is not looked into",
            f"{NOT_AN_MLP}it is not known whether *F* is a matrix product",
        ),
        "Listed under the sites. A custom operator, a kernel of its own, or a function that Dynamo does not look into "
        "(`allow_in_graph`): attention's and norms' are meant so, and stay.",
        "If it computes an MLP's activation, write that in torch's own functions, or take it from "
        "torch_fused_ops.functional. If it is a matrix product of its input with weights, "
        "torch_fused_ops.register_gemm says so.",
    )

    # ---- another function --------------------------------------------------------------------------------------------
    UNKNOWN = _Declared(
        Family.FUNCTION,
        (f"*formula* is no activation of the table{CAN_BE_ADDED}", "*formula* is no activation of the table"),
        "The formula is what the recogniser has read, of one tensor. Registered, it may have your derivative, if you "
        "have a better one than autograd's.",
        _REGISTER,
    )
    UNKNOWN_GATED = _Declared(
        Family.FUNCTION,
        ("*formula* is no activation of the table with a gate",),
        "Of two tensors: not `act(gate) · (up + offset)`, with the same clamp on both.",
    )
    NEAR = _Declared(
        Family.FUNCTION,
        ("*formula* is like *name*, but has *1.7* for *1.702*",),
        "A constant is off by more than 1e-6. If it is a slip, mend it.",
        _REGISTER,
    )
    RELU_KINK = _Declared(
        Family.FUNCTION,
        ("it is relu, but with another gradient exactly at the kink",),
        "`clamp(min=0)`, `maximum(x, 0)` or `(x + |x|) / 2`, where gradients are recorded.",
        "If relu is meant, write F.relu.",
    )
    KINK = _Declared(
        Family.FUNCTION,
        ("it is *name*, but with another gradient exactly at the kink",),
        "Likewise, of an activation that you have registered.",
    )
    ROUNDED = _Declared(
        Family.FUNCTION,
        ("it is *name* in real numbers, but large terms cancel, which rounds",),
        "Such as `(x + 2**23) - 2**23`: there rounding is the meaning.",
    )
    MANY_TENSORS = _Declared(
        Family.FUNCTION, ("*3* different tensors take part; an MLP's activation reads one or two",)
    )
    PARAMETER = _Declared(
        Family.FUNCTION,
        ("a learnable parameter takes part: *alpha*", "a parameter takes part: *alpha*"),
        "xIELU, PReLU: no operator of ours has the parameter, nor its gradient. A factor of the result stays behind "
        "the operator.",
    )
    ANOTHER_TENSOR = _Declared(
        Family.FUNCTION,
        ("another tensor takes part: *name*",),
        "An input, or something computed without a GEMM, inside of the activation or added to it. A factor of the "
        "result, such as a routing weight, stays behind the operator, unless it is computed of the same GEMMs.",
        "A factor for each row can be applied to the GEMM's output, which is the same; functional.glu and its kin take "
        "it as token_scale, shaped as the input without its last axis.",
    )
    MASK = _Declared(
        Family.FUNCTION,
        ("a mask takes part: *op*",),
        "One that selects (`where`, `masked_fill`), or stands between activation and gate. As a factor of the result "
        "it stays behind the operator.",
        "A mask over rows can be applied after the GEMM, which is the same; any other as a factor of the result.",
    )
    DROPOUT_INSIDE = _Declared(
        Family.FUNCTION,
        ("an active dropout stands inside the activation", "an active dropout stands before its activation"),
        "Dropout in front of the GEMM is fine; between activation and gate it is another function.",
    )
    COMPARISON = _Declared(
        Family.FUNCTION,
        ("cannot be proved: a comparison in it, which treats NaN in its own way",),
        "`where(x > 0, x, 0)` is 0 for NaN, where relu is NaN.",
        "If relu is meant, write F.relu.",
    )
    UNPROVABLE = _Declared(
        Family.FUNCTION,
        ("cannot be proved: *what*",),
        "The expression has something that is not read: masks, random slopes, rounding, more than 128 terms, a "
        "function that is called in a way that is not read.",
    )
    CUSTOM_FUNCTION = _Declared(
        Family.FUNCTION,
        (
            "a custom autograd.Function has other results that are read",
            "cannot be proved: *…*a custom autograd.Function*…*",
        ),
        "One is read where its backward is proved to be the derivative of its forward. Straight-through estimators and "
        "the like stay.",
    )
    UNKNOWN_PRODUCT = _Declared(
        Family.FUNCTION,
        ("it is not known whether *F*, a custom autograd.Function, is a matrix product",),
        "It reads a matrix of weights, and shows no product: it calls an operator or a kernel of its own.",
        "If it is a matrix product of its input with weights, torch_fused_ops.register_gemm(F) says so.",
    )
    ARGUMENT = _Declared(Family.FUNCTION, ("an argument of type *T* takes part",), "A complex number, say.")
    TENSOR_BOUND = _Declared(
        Family.FUNCTION, ("a tensor is a clamp's bound",), cure="Write the clamp's bound as a number."
    )

    # ---- replacing it would change something -------------------------------------------------------------------------
    INNER_READER = _Declared(
        Family.SOUNDNESS,
        ("*op* also reads the result of *op* inside the activation",),
        "An inner value is used elsewhere, so it has to be computed anyway.",
        "Where that reader does not need it, the activation is fused.",
    )
    STANDS_BETWEEN = _Declared(
        Family.SOUNDNESS,
        ("*op* stands between the activation's parts",),
        "A view, `detach` or another call inside: take views before the activation or after the product.",
    )
    NARROW_CAST = _Declared(
        Family.SOUNDNESS,
        ("it works in *bfloat16* on *float32* values",),
        "A cast through a narrower dtype: its rounding would be lost. A last cast to a wider one stays behind the "
        "operator.",
    )
    DTYPE = _Declared(Family.SOUNDNESS, ("*op* gives *int64*: only real floating tensors are fused",))
    BROADCAST = _Declared(
        Family.SOUNDNESS, ("a broadcast changes the shape: *a* to *b*",), "Operands must have the result's shape."
    )
    CUT_AXIS = _Declared(
        Family.SOUNDNESS,
        ("gate and up are cut on axis *0* of *2*, not on the last",),
        "The operators' packed axis is the last one.",
    )
    WRITTEN = _Declared(
        Family.SOUNDNESS,
        (
            "*op* writes into it in place before it is read",
            "*op* writes into its input in place",
            "*op* writes into its result in place",
        ),
        "The value is not what the formula says where it is read, or would not be kept for backward. Other libraries' "
        "functions are taken to write what they read, unless their schema says otherwise.",
        _OUT_OF_PLACE,
    )
    GRAPH_RESULT = _Declared(
        Family.SOUNDNESS,
        ("its input is a result of the graph, which may be written before backward needs it",),
        "A pre-activation is returned (or a graph break lies behind it), and PyTorch keeps for backward what the "
        "activation gives instead: tanh, sigmoid, ReLU². So its caller may write it, and could not if the operator "
        "kept it. Return a copy, or move the graph break.",
    )
    READ_AFTERWARDS = _Declared(
        Family.SOUNDNESS,
        ("*op* works in place, and *op* reads the tensor afterwards",),
        "The reader would see the old value.",
        _OUT_OF_PLACE,
    )
    WRITES_INPUT = _Declared(
        Family.SOUNDNESS,
        ("*op* writes in place into *x*",),
        "An input of the graph, which the caller sees.",
        _OUT_OF_PLACE,
    )
    IN_PLACE_REGION = _Declared(
        Family.SOUNDNESS,
        ("*op* works in place in another grad mode or autocast region than its argument's",),
        cure=_OUT_OF_PLACE,
    )
    REGION = _Declared(
        Family.SOUNDNESS,
        ("autocast or grad mode is switched between its parts",),
        "A cone stays within one region. What is entered and left again between its calls is no matter.",
        "Put the MLP as a whole inside or outside of the block that switches it.",
    )
    INFERENCE_MODE = _Declared(
        Family.SOUNDNESS, ("the result of *op*, from inference mode, cannot be saved for backward",)
    )
    TRANSFORM = _Declared(
        Family.SOUNDNESS,
        ("it is computed under a torch.func transform (vmap, grad, …)",),
        "Inside the transform the recorded values are its wrappers.",
    )
    SUBCLASS = _Declared(
        Family.SOUNDNESS,
        (
            "*op* gives a *T*: tensor subclasses are left alone",
            "*weight* is a *T*: tensor subclasses are left alone",
        ),
        "Quantised and other wrapper tensors have meanings of their own. DTensors are read behind `to_local`.",
    )
    DEVICES = _Declared(Family.SOUNDNESS, ("it is computed on *cpu* and on *cuda:0*",))
    ORDER = _Declared(
        Family.SOUNDNESS,
        ("its result is laid out in memory in another order than the operator's",),
        "The result is not dense. Dense ones are fused in whatever order they lie in.",
    )
    MANY_CALLS = _Declared(Family.SOUNDNESS, ("more than *64* pointwise calls lie between the GEMMs",))
    PROBABILITY = _Declared(
        Family.SOUNDNESS,
        ("its probability is no constant", "its dropout's probability is no number"),
        "A dropout's `p` that is a tensor, or a number that differs from call to call.",
    )
    UNRECORDED = _Declared(
        Family.SOUNDNESS,
        ("the graph does not record the shape and dtype of *op*", "the capture does not record what *op* gives"),
        "The graph was not made by Dynamo or `torch.export`.",
    )

    # ---- you, or Inductor --------------------------------------------------------------------------------------------
    BOUNDARY = _Declared(
        Family.CHOICE,
        ("the boundary of *tag_activation_checkpoint* lies between it and a GEMM",),
        "Listed under the sites: a part of an MLP alone is inside a checkpoint or another higher-order operator, whose "
        "body is a graph of its own.",
        "Put all of the MLP inside, or all outside.",
    )
    DROPOUT_POLICY = _Declared(
        Family.CHOICE,
        ("the policy leaves dropouts as they are (dropout=False)",),
        "`FusionPolicy(dropout=False)`.",
        wanted=True,
    )
    FALLBACK_RANDOM = _Declared(
        Family.CHOICE,
        ("inductor's fallback_random asks for eager's random numbers",),
        "`torch._inductor.config.fallback_random`: a dropout's mask is to be eager's own.",
        wanted=True,
    )
    EXCLUDED = _Declared(
        Family.CHOICE,
        ("the policy excludes *pattern*",),
        "`strict` does not count it.",
        "Take the pattern out of FusionPolicy(exclude=…) to have it looked at.",
        wanted=True,
    )
    FREEZING = _Declared(
        Family.CHOICE,
        ("CPU inference under freezing: oneDNN's fused linear and activation is kept",),
        "Inductor's own fusion is better there.",
    )
    EAGER_ROUNDING = _Declared(
        Family.CHOICE,
        (
            "inductor's *numerics='strict'* asks for eager's own rounding",
            "inductor's *emulate_precision_casts=True* asks for eager's own rounding",
        ),
        "Eager rounds after each call, an operator once. `emulate_precision_casts` is for half precision.",
        "Exclude the module, or compile without the setting.",
    )

    # ---- modules that replace_mlps leaves alone ----------------------------------------------------------------------
    NO_ACTIVATION = _Declared(
        Family.MODULE,
        ("there is no activation between linear layers in it",),
        "It is no MLP: reports do not list it.",
    )
    LINEAR = _Declared(
        Family.MODULE,
        (
            "*at its end* stands *op*, where a linear layer was looked for: F.linear, addmm, x @ w or x @ w + b, of "
            "parameters of the module",
            "a linear layer's weight is computed (*op*): it is no parameter of its own",
            "a linear layer's bias is no vector of its own (*op*)",
        ),
        "An adapter, quantised or parametrized weights; or a sum or a norm where the linear layer should be.",
    )
    MORE = _Declared(
        Family.MODULE,
        (
            "its last linear layer does not read the activation, but *op*",
            "a linear layer in front of its activation does not read its input, but *op*",
            "its activation is computed in *dtype*",
            "two dropouts follow one another",
            "its result has other leading axes than its input",
            "its forward also calls *op*",
            f"{NOT_AN_MLP}*reason*",
        ),
        "Its forward does more than an MLP: an MLP's module inside of it may be replaced.",
    )
    SIZES = _Declared(Family.MODULE, ("its forward depends on its input's sizes: *conditions*",))
    RESULTS = _Declared(Family.MODULE, ("it gives *2* tensors", "it gives something else than one tensor"))
    ARGUMENTS = _Declared(Family.MODULE, ("it is called with *2* arguments",))
    OTHER_INPUTS = _Declared(
        Family.MODULE,
        ("it cannot be captured in one graph: it needs other inputs: *error*",),
        "Tried with (2, 3, the input size of its first linear layer). Without example inputs it is a note of the "
        "report: `replace_mlps(model, *inputs)`.",
    )
    UNCAPTURED = _Declared(
        Family.MODULE,
        ("it cannot be captured in one graph: *error*",),
        "Dynamo's own words; a forward that depends on its input's values, for example.",
    )
    DISABLED = _Declared(Family.MODULE, ("Dynamo did not capture it (is it disabled?)",))
    NOT_CALLED = _Declared(Family.MODULE, ("it was not called with these inputs",))
    STACKED = _Declared(
        Family.MODULE,
        (
            "its weights are stacked, as a mixture's experts are: nn.GroupedMLP computes those (docs/modules.md, "
            'Experts), and torch.compile(model, backend="fused") finds their activations',
        ),
    )
    DTENSORS = _Declared(
        Family.MODULE,
        (
            "its weights are DTensors: call replace_mlps before fully_shard; a tensor-parallel plan takes nn.FusedMLP "
            "or nn.MLP instead (docs/distributed.md)",
        ),
    )
    REPLACED = _Declared(Family.MODULE, ("it is replaced already",))
    SCRIPT = _Declared(Family.MODULE, ("it is a script",), "`torch.jit.script`'s.")
    COMPILED = _Declared(
        Family.MODULE, ("it is compiled already: pick-up reads it there", "*up* in it is compiled already")
    )
    HOOKED = _Declared(
        Family.MODULE,
        (
            "*up*: *Linear has a hook*, which a fused forward would not run",
            "*Linear has a hook*, which its fused forward would not run",
        ),
        "Or its forward was put in its place, or it is compiled.",
    )
    ATTRIBUTES = _Declared(
        Family.MODULE, ("its forward changes the module's attributes",), "A counter, or something it keeps."
    )
    UNWATCHED = _Declared(
        Family.MODULE,
        ("its forward reads what it changes, or what cannot be watched: *what*",),
        "Attributes of a parameter; methods of an object that it makes itself.",
    )
    INPUT = _Declared(
        Family.MODULE,
        ("its input is no plain tensor, or empty",),
        "From here on, later: for such a call it runs its own forward.",
    )
    AT_WORK = _Declared(
        Family.MODULE,
        (
            "a torch.func transform or a tracer is at work",
            "forward-mode derivatives or global module hooks are at work",
        ),
    )
    CLASS_CHANGED = _Declared(
        Family.MODULE, ("its class got *name* after it was replaced: set it before, or on the module",)
    )
    SITUATIONS = _Declared(
        Family.MODULE,
        ("it was in too many situations already",),
        "An attribute that is another at every call must not cost a proof each.",
    )

    # ---- linear layers that stay in the model's dtype ----------------------------------------------------------------
    GEMM_DEVICE = _Declared(
        Family.GEMM,
        (
            "this device (*sm_80*) has no products of float8 with a scale for each *block of 128*",
            "this device (*sm_89*) has no products of experts in float8",
        ),
        "[A table](fp8.md#recipes) has each recipe's devices. On CPUs all are computed in the model's dtype, of the "
        "same numbers.",
        'Use this policy on such a GPU; more have `gemm="fp8-rowwise"` than `"fp8"`, and Blackwell has `"mxfp8"`.',
    )
    GEMM_SIZE = _Declared(
        Family.GEMM,
        ("its weight is (*1000*, *8*): not multiples of *128*",),
        "Blocks are 128 wide, or 32; of rows, libraries multiply such whose sizes are multiples of 16. Adapters of low "
        "rank stay as they are, and cost next to nothing.",
        'gemm="fp8-rowwise" takes multiples of 16.',
    )
    GEMM_EXPERTS = _Declared(
        Family.GEMM,
        ("experts are multiplied in float8 with a scale for each row, not for each *block of 128*",),
        "torch's grouped products of float8 have a scale for each row, and on some builds for each 32 elements.",
        'Name these modules in a mapping: `gemm={"*.experts": "fp8-rowwise", "*": "fp8"}`.',
    )
    GEMM_DTYPE = _Declared(Family.GEMM, ("it gives *float64*",), "Float8 is for bfloat16, float16 and float32.")
    GEMM_FORM = _Declared(
        Family.GEMM,
        ("*bmm* is no linear layer",),
        "A product of a batch of matrices, or of another library.",
    )
    # ---- MLPs that are not cut into tiles ----------------------------------------------------------------------------
    TILE_FEW = _Declared(
        Family.TILES,
        ("*4096* tokens are too few for two tiles of *8192*", "*4* tokens are too few for *8* tiles"),
        "Shorter tiles take longer: each reads all weights. `strict` does not count these.",
        wanted=True,
    )
    TILE_DROPOUT = _Declared(
        Family.TILES,
        ("an active dropout stands inside",),
        "Its mask would be another one in every tile. Behind the second linear layer dropouts stay, of all tokens.",
        "Move the dropout behind the MLP's second linear layer.",
    )
    TILE_CALLERS = _Declared(
        Family.TILES,
        ("its input, *x*, the caller may write before backward needs it",),
        *_OF_CALLERS,
    )
    TILE_READER = _Declared(
        Family.TILES,
        ("*sum* reads the result of *linear*, too", "*2* calls read the hidden layer: *linear*"),
        "The hidden layer would have to be whole for that.",
    )
    TILE_FORM = _Declared(
        Family.TILES,
        (
            "*index* stands between its input and its result",
            "*mul* combines it with *scale*, which is no vector",
            "no linear layer stands in front of it",
            "its tokens do not lie one after the other in memory",
            "not every row of its input becomes a row of its result",
            "more than *64* calls stand between its input and its result",
            "*linear* is in the tiles of the MLP before it",
        ),
        "A tile consists of linear layers, biases, adapters, casts and the activation: rows that are computed of a row "
        "each. Experts are none.",
    )
    TILE_SIZE = _Declared(
        Family.TILES,
        ("the number of its tokens is not known when it is compiled",),
        "It depends on data, as an expert's tokens do.",
    )
    TILE_FP8 = _Declared(
        Family.TILES,
        ("its linear layers are in float8",),
        'Of `gemm="fp8"` and `memory="tiled"` the first holds.',
        "Name the modules that are to be tiled in memory=, and others in gemm=.",
    )
    # ---- tensors that a memory level leaves as they are --------------------------------------------------------------
    CHECKPOINTED = _Declared(Family.MEMORY, ("selective checkpointing has decided to keep it",))
    FP8_DTYPE = _Declared(Family.MEMORY, ("it is *float64*",), '`"fp8"` is for float32 and below.')
    FP8_DEVICE = _Declared(
        Family.MEMORY,
        ("this GPU has no instruction that makes float8_e4m3fn",),
        "NVIDIA's have it from sm_89 on.",
    )
    ALSO_READ = _Declared(
        Family.MEMORY,
        ("backward reads it in *op*, too",),
        "Whatever else reads it would see the rounding.",
    )
    NO_GEMM = _Declared(Family.MEMORY, ("no GEMM made it",), '`"input"` computes GEMMs again, and nothing else.')
    COSTS_MORE = _Declared(
        Family.MEMORY,
        ("what it is made of takes *n* bytes, and is not kept otherwise",),
        "A first weight that is frozen: nothing else keeps its GEMM's input.",
    )
    MADE_OF_WRITTEN = _Declared(
        Family.MEMORY, ("it is made of *x*, which forward writes",), "Backward would make another value of it."
    )
    MADE_OF_CALLERS = _Declared(
        Family.MEMORY,
        ("it is made of *x*, which the caller may write before backward needs it",),
        *_OF_CALLERS,
    )
    MADE_OF_SIZE = _Declared(Family.MEMORY, ("it is made of *s*, a size that is not kept",))
    # ---- graph breaks ------------------------------------------------------------------------------------------------
    GRAPH_BREAK = _Declared(
        Family.CAPTURE,
        ("a graph break: *reason*",),
        "Dynamo's own words.",
        "Take the line out of the model's forward, or out of the MLP. TORCH_LOGS=graph_breaks has Dynamo's hints; "
        "torch.compile(fullgraph=True) makes a break an error.",
    )
    EXPERT_LOOP = _Declared(
        Family.CAPTURE,
        ("a graph break in a loop over experts: *reason*",),
        "A mixture of experts of transformers' that computes one expert after the other, on as many tokens as the data "
        "give it.",
        'model.set_experts_implementation("grouped_mm") computes all experts in grouped products, in which pick-up '
        "finds the activation.",
    )

    def __repr__(self) -> str:
        return str(self)  # not the whole declaration, where a site is shown

    @property
    def family(self) -> Family:
        """The table of the page that it stands in."""
        return self.value.family

    @property
    def texts(self) -> tuple[str, ...]:
        """What the report says, one or several forms; in *italics* stands what differs from model to model."""
        return self.value.texts

    @property
    def means(self) -> str:
        """What that means, in Markdown."""
        return self.value.means

    @property
    def cure(self) -> str:
        """What can be done about it, for a report's hints; "" where there is nothing, or nothing to do."""
        return self.value.cure

    @property
    def row(self) -> str:
        """Where the kind stands in the docs: "docs/recognition.md#near"."""
        return f"docs/recognition.md#{self.name.lower().replace('_', '-')}"

    @property
    def advice(self) -> str:
        """What helps, and where the docs say more: "If relu is meant, write F.relu (docs/recognition.md#relu-kink)"."""
        return f"{self.cure} ({self.row})" if self.cure else self.row

    @property
    def is_mlp(self) -> bool:
        """Whether what was refused is an MLP, which could have been fused."""
        return self.family is not Family.NOT_AN_MLP

    @property
    def is_wanted(self) -> bool:
        """Whether it is as the user has asked: no miss."""
        return self.value.wanted


class Reason(NamedTuple):
    """Why something is left as it is.

    Attributes:
        kind: what programs read.
        text: for people. Read by ``str`` alone.
        excluded_by: the policy's pattern, where the kind is ``EXCLUDED``.
    """

    kind: Kind
    text: str
    excluded_by: str = ""

    @property
    def cure(self) -> str:
        """What can be done about it."""
        return self.kind.cure

    def __str__(self) -> str:
        return self.text


class Refusal(Exception):
    """Something is left as it is; ``reason`` says why."""

    def __init__(self, kind: Kind, text: str, excluded_by: str = "") -> None:
        super().__init__(kind, text, excluded_by)
        self.reason = Reason(kind, text, excluded_by)

    def __str__(self) -> str:
        return str(self.reason)


def excluded(pattern: str) -> Reason:
    """The reason for what a policy's ``exclude`` names."""
    return Reason(Kind.EXCLUDED, f"the policy excludes {pattern!r}", pattern)
