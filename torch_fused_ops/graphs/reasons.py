"""The reasons why something is not fused, as data: a code, a category and a hint for each kind.

``Rejection(Kind.MASK, "a mask takes part: gt")`` has a kind and a text. The text is for people and may be reworded.
Programs read the kind alone: it says whether a site counts as an MLP, whether ``strict`` counts it, and which hint a
report shows. ``docs/reasons.json`` explains every kind; ``python docs/generate.py`` writes docs/recognition.md from it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

NOT_AN_MLP = "not an MLP: "  # prefix of reasons for sites that ``strict`` never counts


class Category(Enum):
    """The categories of reasons, in the order of the tables in docs/recognition.md."""

    NOT_AN_MLP = auto()  # ``strict`` does not count these
    FUNCTION = auto()  # not a supported activation
    SOUNDNESS = auto()  # fusing it would change results
    CHOICE = auto()  # a setting of the user or of Inductor
    GEMM = auto()  # linear layers that stay in the model's dtype
    TILES = auto()  # MLPs that are not cut into tiles
    MEMORY = auto()  # tensors that a memory level does not change
    CAPTURE = auto()  # graph breaks


_REGISTER = (
    'If intended, register it: torch_fused_ops.register_activation("name", fn), where fn is this function of one '
    "tensor."
)
_OUT_OF_PLACE = "Use the out-of-place op."


class Kind(Enum):
    """The kinds of reasons. A kind's name is its code, for example in JSON as a site's ``kind``.

    Attributes:
        category: the category, which has a table in the docs.
        hint: a remedy, for reports; "" if no remedy is known.
        is_requested: True if the user requested it, so that ``strict`` does not count it.
    """

    category: Category
    hint: str
    is_requested: bool

    def __new__(cls, category: Category, hint: str = "", is_requested: bool = False) -> Kind:
        kind = object.__new__(cls)
        kind._value_ = len(cls.__members__)  # unique: members with equal values would be aliases
        kind.category, kind.hint, kind.is_requested = category, hint, is_requested
        return kind

    OTHER_OPERAND = Category.NOT_AN_MLP
    COMPUTED_PRODUCT = Category.NOT_AN_MLP
    CONSTANT = Category.NOT_AN_MLP
    NO_GEMM_READS = Category.NOT_AN_MLP
    NO_GEMM_BEFORE = Category.NOT_AN_MLP
    OPAQUE = (
        Category.NOT_AN_MLP,
        "If it computes an MLP's activation, write it with torch's own functions, or use "
        "torch_fused_ops.functional. If it multiplies its input by weights, register it: "
        "torch_fused_ops.register_gemm.",
    )
    OTHER_DROPOUT = Category.NOT_AN_MLP

    UNKNOWN = Category.FUNCTION, _REGISTER
    UNKNOWN_GATED = Category.FUNCTION
    NEAR = Category.FUNCTION, _REGISTER
    RELU_KINK = Category.FUNCTION, "If relu is intended, write F.relu."
    KINK = Category.FUNCTION
    ROUNDED = Category.FUNCTION
    MANY_TENSORS = Category.FUNCTION
    PARAMETER = (
        Category.FUNCTION,
        "It may scale the activation's input and the result behind the gate. If it is swish's slope and not 0, write "
        "F.silu(beta * h) * up / beta.",
    )
    ANOTHER_TENSOR = (
        Category.FUNCTION,
        "Multiply the activation's result by it, or the activation's input. functional.glu and similar functions take "
        "a factor per row as token_scale, shaped as the input without its last axis.",
    )
    MASK = (
        Category.FUNCTION,
        "Apply the mask to the input of the activation and its gate, or to their result. The values stay the same if "
        "the mask fills with 0, act(0) = 0, and what it hides is finite.",
    )
    DROPOUT_INSIDE = Category.FUNCTION
    COMPARISON = (
        Category.FUNCTION,
        "If relu is intended, write F.relu. If leaky ReLU is intended, write F.leaky_relu. Register other "
        "slopes than 0.01: torch_fused_ops.register_activation('leaky', lambda x: F.leaky_relu(x, 0.1)).",
    )
    UNPROVABLE = Category.FUNCTION
    CUSTOM_FUNCTION = Category.FUNCTION, "Write the formula with torch's own functions, such as F.relu(x).square()."
    ARGUMENT = Category.FUNCTION
    TENSOR_BOUND = Category.FUNCTION, "Write the clamp's bound as a number."

    INNER_READER = Category.SOUNDNESS, "The activation is fused if that op does not read it."
    STANDS_BETWEEN = Category.SOUNDNESS
    NARROW_CAST = Category.SOUNDNESS
    DTYPE = Category.SOUNDNESS
    BROADCAST = Category.SOUNDNESS
    WRITTEN = Category.SOUNDNESS, _OUT_OF_PLACE
    GRAPH_RESULT = Category.SOUNDNESS
    READ_AFTERWARDS = Category.SOUNDNESS, _OUT_OF_PLACE
    WRITES_INPUT = Category.SOUNDNESS, _OUT_OF_PLACE
    IN_PLACE_REGION = Category.SOUNDNESS, _OUT_OF_PLACE
    REGION = Category.SOUNDNESS, "Put the whole MLP inside or outside the block that switches it."
    INFERENCE_MODE = Category.SOUNDNESS
    TRANSFORM = Category.SOUNDNESS
    SUBCLASS = Category.SOUNDNESS
    DEVICES = Category.SOUNDNESS
    ORDER = Category.SOUNDNESS
    MANY_CALLS = Category.SOUNDNESS
    PROBABILITY = Category.SOUNDNESS
    UNRECORDED = Category.SOUNDNESS

    BOUNDARY = (
        Category.CHOICE,
        "Put the whole MLP inside, or outside. Register a tensor hook on the MLP's input or result.",
    )
    DROPOUT_POLICY = Category.CHOICE, "", True
    FALLBACK_RANDOM = Category.CHOICE, "", True
    EXCLUDED = (
        Category.CHOICE,
        "To have it fused, remove the pattern from FusionPolicy(exclude=…).",
        True,
    )
    FREEZING = Category.CHOICE
    EAGER_ROUNDING = Category.CHOICE, "Exclude the module, or compile without the setting."

    GEMM_DEVICE = (
        Category.GEMM,
        'Use a GPU that has them. More GPUs support `gemm="fp8-rowwise"` than `"fp8"`; Blackwell supports `"mxfp8"`.',
    )
    GEMM_SIZE = Category.GEMM, 'gemm="fp8-rowwise" takes multiples of 16.'
    GEMM_EXPERTS = (
        Category.GEMM,
        'Use a mapping for these modules: `gemm={"*.experts": "fp8-rowwise", "*": "fp8"}`.',
    )
    GEMM_DTYPE = Category.GEMM
    GEMM_FORM = Category.GEMM

    TILE_FEW = Category.TILES, "", True
    TILE_DROPOUT = Category.TILES, "Move the dropout after the MLP's second linear layer."
    TILE_CALLERS = (
        Category.TILES,
        "Compile the code that computes it in the same graph: the graph can save its own tensors for backward.",
    )
    TILE_READER = Category.TILES
    TILE_FORM = Category.TILES
    TILE_SIZE = Category.TILES
    TILE_FP8 = Category.TILES, "Use mappings: name the modules to tile in memory=, and other modules in gemm=."

    CHECKPOINTED = Category.MEMORY
    IN_CHECKPOINT = Category.MEMORY, 'checkpoints="replace" would apply it.'
    OUTER_CHECKPOINT = (
        Category.MEMORY,
        "Compile the function that calls torch.utils.checkpoint: only checkpoints in compiled graphs can be replaced.",
    )
    NOTHING_SAVED = Category.MEMORY, "Compile attention and its linear layers in one graph."
    FP8_DTYPE = Category.MEMORY
    FP8_DEVICE = Category.MEMORY
    FP8_CLAMP = Category.MEMORY, 'memory="input" saves less and does not round.'
    ALSO_READ = Category.MEMORY
    NO_GEMM = Category.MEMORY
    COSTS_MORE = Category.MEMORY
    MADE_OF_SIZE = Category.MEMORY
    MANY_RECOMPUTED = Category.MEMORY
    STAYS_WITH_CALLER = Category.MEMORY
    STAYS_BY_FORM = Category.MEMORY
    STAYS_SMALL = Category.MEMORY
    STAYS_UNHIDDEN = Category.MEMORY

    GRAPH_BREAK = (
        Category.CAPTURE,
        "Move the line out of the model's forward, or out of the MLP. TORCH_LOGS=graph_breaks shows Dynamo's hints; "
        "torch.compile(fullgraph=True) makes a graph break an error.",
    )
    DDP_BUCKET = (
        Category.CAPTURE,
        "Set torch._dynamo.config.optimize_ddp = False. Larger buckets do not help: the first one stays at 1 MiB.",
    )

    @property
    def row(self) -> str:
        """Return the address of its row in the docs: "docs/recognition.md#near"."""
        return f"docs/recognition.md#{self.name.lower().replace('_', '-')}"

    @property
    def advice(self) -> str:
        """Return the hint, and the row in the docs: "If relu is intended, … (docs/recognition.md#relu-kink)"."""
        return f"{self.hint} ({self.row})" if self.hint else self.row

    @property
    def is_mlp(self) -> bool:
        """Return True if a site rejected for this reason is an MLP."""
        return self.category is not Category.NOT_AN_MLP


class Reason(NamedTuple):
    """The reason why something is not fused.

    Attributes:
        kind: the code, for programs.
        text: the message, for people; only ``__str__`` reads it.
        excluded_by: the policy's pattern, if the kind is ``EXCLUDED``.
    """

    kind: Kind
    text: str
    excluded_by: str = ""

    def __str__(self) -> str:
        return self.text


class Rejection(Exception):
    """Raised to reject a match; ``reason`` says why."""

    def __init__(self, kind: Kind, text: str, excluded_by: str = "") -> None:
        super().__init__(kind, text, excluded_by)
        self.reason = Reason(kind, text, excluded_by)

    def __str__(self) -> str:
        return str(self.reason)
