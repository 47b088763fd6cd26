"""Why something is not fused, as data: every kind of reason, and what helps, each in one place.

``Rejection(Kind.MASK, "a mask takes part: gt")`` is raised with its kind and its text. The text is for people.
Whatever goes on from there (whether a site counts as an MLP, whether ``strict`` asks for it, which hint a report gives)
reads the kind: texts may be reworded. ``docs/reasons.json`` has the texts and explanations of all kinds, of which
``python docs/generate.py`` writes the tables of docs/recognition.md.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

__all__ = ["CAN_BE_ADDED", "NOT_AN_MLP", "Category", "Kind", "Reason", "Rejection", "excluded"]

NOT_AN_MLP = "not an MLP: "  # in front of the texts of what no policy counts as a miss
CAN_BE_ADDED = " (register_activation can add it)"  # behind a text, for where no hint is shown


class Category(Enum):
    """The tables of docs/recognition.md, in its order: each holds the kinds of one category."""

    NOT_AN_MLP = auto()  # ``strict`` does not count these
    FUNCTION = auto()  # another function than an activation of the table
    SOUNDNESS = auto()  # replacing it would change something
    CHOICE = auto()  # the user's, or Inductor's
    MODULE = auto()  # modules that replace_mlps does not compile
    GEMM = auto()  # linear layers that stay in the model's dtype
    TILES = auto()  # MLPs that are not cut into tiles
    MEMORY = auto()  # tensors that a memory level leaves as they are
    CAPTURE = auto()  # graph breaks


_REGISTER = (
    'If it is meant so, torch_fused_ops.register_activation("name", fn) adds it, fn being this function of one '
    "tensor; then it is proved and fused."
)
_OUT_OF_PLACE = "Write the operation that works in place out of place."
_SAME_GRAPH = "Compile what is in front of it in the same graph: what the graph makes for itself can be kept."


class Kind(Enum):
    """The kinds of reasons; a kind's name is its code, which JSON has as a site's ``kind``.

    Attributes:
        category: the table that it stands in.
        hint: what its reader can do about it, in plain words, for reports; "" where there is nothing to do.
        is_requested: the user has asked for it, so ``strict`` does not count it.
    """

    category: Category
    hint: str
    is_requested: bool

    def __new__(cls, category: Category, hint: str = "", is_requested: bool = False) -> Kind:
        kind = object.__new__(cls)
        kind._value_ = len(cls.__members__)  # of its own: enums of equal values would be one
        kind.category, kind.hint, kind.is_requested = category, hint, is_requested
        return kind

    OTHER_OPERAND = Category.NOT_AN_MLP
    COMPUTED_PRODUCT = Category.NOT_AN_MLP
    CONSTANT = Category.NOT_AN_MLP
    NO_GEMM_READS = Category.NOT_AN_MLP
    NO_GEMM_BEFORE = Category.NOT_AN_MLP
    OPAQUE = (
        Category.NOT_AN_MLP,
        "If it computes an MLP's activation, write that in torch's own functions, or take it from "
        "torch_fused_ops.functional. If it is a matrix product of its input with weights, "
        "torch_fused_ops.register_gemm says so.",
    )

    UNKNOWN = Category.FUNCTION, _REGISTER
    UNKNOWN_GATED = Category.FUNCTION
    NEAR = Category.FUNCTION, _REGISTER
    RELU_KINK = Category.FUNCTION, "If relu is meant, write F.relu."
    KINK = Category.FUNCTION
    ROUNDED = Category.FUNCTION
    MANY_TENSORS = Category.FUNCTION
    PARAMETER = Category.FUNCTION
    ANOTHER_TENSOR = (
        Category.FUNCTION,
        "A factor for each row can be applied to the GEMM's output, which is the same; functional.glu and its kin take "
        "it as token_scale, shaped as the input without its last axis.",
    )
    MASK = (
        Category.FUNCTION,
        "A mask over rows can be applied after the GEMM, which is the same; any other as a factor of the result.",
    )
    DROPOUT_INSIDE = Category.FUNCTION
    COMPARISON = Category.FUNCTION, "If relu is meant, write F.relu."
    UNPROVABLE = Category.FUNCTION
    CUSTOM_FUNCTION = Category.FUNCTION
    UNKNOWN_PRODUCT = (
        Category.FUNCTION,
        "If it is a matrix product of its input with weights, torch_fused_ops.register_gemm(F) says so.",
    )
    ARGUMENT = Category.FUNCTION
    TENSOR_BOUND = Category.FUNCTION, "Write the clamp's bound as a number."

    INNER_READER = Category.SOUNDNESS, "Where that reader does not need it, the activation is fused."
    STANDS_BETWEEN = Category.SOUNDNESS
    NARROW_CAST = Category.SOUNDNESS
    DTYPE = Category.SOUNDNESS
    BROADCAST = Category.SOUNDNESS
    CUT_AXIS = Category.SOUNDNESS
    WRITTEN = Category.SOUNDNESS, _OUT_OF_PLACE
    GRAPH_RESULT = Category.SOUNDNESS
    READ_AFTERWARDS = Category.SOUNDNESS, _OUT_OF_PLACE
    WRITES_INPUT = Category.SOUNDNESS, _OUT_OF_PLACE
    IN_PLACE_REGION = Category.SOUNDNESS, _OUT_OF_PLACE
    REGION = Category.SOUNDNESS, "Put the MLP as a whole inside or outside of the block that switches it."
    INFERENCE_MODE = Category.SOUNDNESS
    TRANSFORM = Category.SOUNDNESS
    SUBCLASS = Category.SOUNDNESS
    DEVICES = Category.SOUNDNESS
    ORDER = Category.SOUNDNESS
    MANY_CALLS = Category.SOUNDNESS
    PROBABILITY = Category.SOUNDNESS
    UNRECORDED = Category.SOUNDNESS

    BOUNDARY = Category.CHOICE, "Put all of the MLP inside, or all outside."
    DROPOUT_POLICY = Category.CHOICE, "", True
    FALLBACK_RANDOM = Category.CHOICE, "", True
    EXCLUDED = (
        Category.CHOICE,
        "Take the pattern out of FusionPolicy(exclude=…) to have it looked at.",
        True,
    )
    FREEZING = Category.CHOICE
    EAGER_ROUNDING = Category.CHOICE, "Exclude the module, or compile without the setting."

    COMPILED = (
        Category.MODULE,
        'Call `restore()` of the earlier report, or compile the model by `backend="fused"` alone.',
    )
    UNPLACED = Category.MODULE

    GEMM_DEVICE = (
        Category.GEMM,
        'Use this policy on such a GPU; more have `gemm="fp8-rowwise"` than `"fp8"`, and Blackwell has `"mxfp8"`.',
    )
    GEMM_SIZE = Category.GEMM, 'gemm="fp8-rowwise" takes multiples of 16.'
    GEMM_EXPERTS = (
        Category.GEMM,
        'Name these modules in a mapping: `gemm={"*.experts": "fp8-rowwise", "*": "fp8"}`.',
    )
    GEMM_DTYPE = Category.GEMM
    GEMM_FORM = Category.GEMM

    TILE_FEW = Category.TILES, "", True
    TILE_DROPOUT = Category.TILES, "Move the dropout behind the MLP's second linear layer."
    TILE_CALLERS = Category.TILES, _SAME_GRAPH
    TILE_READER = Category.TILES
    TILE_FORM = Category.TILES
    TILE_SIZE = Category.TILES
    TILE_FP8 = Category.TILES, "Name the modules that are to be tiled in memory=, and others in gemm=."

    CHECKPOINTED = Category.MEMORY
    FP8_DTYPE = Category.MEMORY
    FP8_DEVICE = Category.MEMORY
    ALSO_READ = Category.MEMORY
    NO_GEMM = Category.MEMORY
    COSTS_MORE = Category.MEMORY
    MADE_OF_WRITTEN = Category.MEMORY
    MADE_OF_CALLERS = Category.MEMORY, _SAME_GRAPH
    MADE_OF_SIZE = Category.MEMORY

    GRAPH_BREAK = (
        Category.CAPTURE,
        "Take the line out of the model's forward, or out of the MLP. TORCH_LOGS=graph_breaks has Dynamo's hints; "
        "torch.compile(fullgraph=True) makes a break an error.",
    )
    EXPERT_LOOP = (
        Category.CAPTURE,
        'model.set_experts_implementation("grouped_mm") computes all experts in grouped products, in which pick-up '
        "finds the activation.",
    )

    def __repr__(self) -> str:
        return str(self)  # without its number, where a site is shown

    @property
    def row(self) -> str:
        """Its place in the docs: "docs/recognition.md#near"."""
        return f"docs/recognition.md#{self.name.lower().replace('_', '-')}"

    @property
    def advice(self) -> str:
        """Its hint, and its place in the docs: "If relu is meant, write F.relu (docs/recognition.md#relu-kink)"."""
        return f"{self.hint} ({self.row})" if self.hint else self.row

    @property
    def is_mlp(self) -> bool:
        """True where what was refused is an MLP, which could have been fused."""
        return self.category is not Category.NOT_AN_MLP


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

    def __str__(self) -> str:
        return self.text


class Rejection(Exception):
    """Something is left as it is; ``reason`` says why."""

    def __init__(self, kind: Kind, text: str, excluded_by: str = "") -> None:
        super().__init__(kind, text, excluded_by)
        self.reason = Reason(kind, text, excluded_by)

    def __str__(self) -> str:
        return str(self.reason)


def excluded(pattern: str) -> Reason:
    """The reason for what a policy's ``exclude`` names."""
    return Reason(Kind.EXCLUDED, f"the policy excludes {pattern!r}", pattern)
