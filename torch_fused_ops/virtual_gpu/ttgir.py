"""Evaluate the integers of a kernel's TTGIR: the addresses and masks of its loads and stores.

TTGIR is Triton's last form in which an access names a tensor of addresses. It is the first form with layouts, which map
elements to threads. Integer operations are evaluated for several programs at once, on tensors (programs, *shape).
Floating-point values are not evaluated; each one records only the loads it depends on.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from . import layouts


class NotAnalyzed(Exception):
    """A kernel has an operation that cannot be evaluated. The message is a sentence about the kernel."""


class _Divergent(Exception):
    """Programs take different branches. The argument holds each program's condition."""


class Grid(NamedTuple):
    """The programs of a launch and their threads."""

    sizes: tuple[int, int, int]
    threads: int  # threads per program
    warp_size: int

    def ids(self, programs: Tensor) -> Tensor:
        """Convert program numbers to ids (..., 3)."""
        x, y, _ = self.sizes
        return torch.stack([programs % x, programs // x % y, programs // (x * y)], -1)

    def program(self, number: Tensor) -> str:
        """Format a program's ids for a message."""
        return f"program {tuple(self.ids(number).tolist())}"


class Type(NamedTuple):
    """The type of a value."""

    shape: tuple[int, ...] = ()  # () for a scalar
    itemsize: int = 0  # bytes per element
    encoding: str = ""  # the layout
    bits: int = 0  # 0 unless the type is an integer


@dataclass
class Op:
    """An operation: its name, the text after the name without types, and the operations in its regions."""

    results: tuple[str, ...]
    name: str
    text: str
    operands: tuple[str, ...] = ()
    types: tuple[Type, ...] = ()  # types of operands and results, in the text's order
    line: str = ""  # the source line: ", line 12"
    regions: list[list[Op]] = field(default_factory=list)


class Value(NamedTuple):
    """An integer, or an address as a byte offset from a pointer argument. Other values have only ``loads``."""

    data: Tensor | None = None  # (programs or 1, *shape); None if it is not evaluated
    argument: str = ""  # the pointer argument; "" for an integer
    overflowed: Tensor | None = None  # mask of elements that depend on an overflowed 32-bit integer, or None
    loads: frozenset[str] = frozenset()  # names of the loads that the value depends on


class Access(NamedTuple):
    """A load or store by programs on the same path. Addresses and masks are tensors (programs, elements)."""

    kind: str  # "load", "store" or "atomic"
    order: int  # position in the order of execution
    argument: str  # "" if the address is unknown
    address: Tensor  # byte offset from the argument's first byte
    active: Tensor  # elements that the mask enables; all if the mask is unknown
    mask_known: bool
    itemsize: int
    shape: tuple[int, ...]  # the shape of the address tensor
    encoding: str  # the layout
    name: str  # "tt.load %tmp0, line 12"
    value: frozenset[str]  # the loads that a store's value depends on; for a load, its own name
    overflowed: Tensor | None  # mask of addresses that an overflow has reached, or None
    programs: Tensor  # program numbers
    barriers: int  # number of barriers before the access
    in_part: bool  # iterations of an enclosing loop were skipped
    crosses_threads: bool = False  # a reduction or a layout conversion passes the loaded value to other threads

    def __str__(self) -> str:
        return f"{self.kind} of {self.argument} ({self.name})"


# ---- reading ---------------------------------------------------------------------------------------------------------

_LOCATION = re.compile(r' loc\((?:[^()"]|"[^"]*"|\([^()]*\))*\)')
_OPERATION = re.compile(r'(?:(%[\w$.-]+)(?::(\d+))?(?:, %[\w$.:-]+)* = )?"?([a-z_]+[\w.]*)"?(.*)')
_NAME = re.compile(r"%[\w$.-]+(?:#\d+)?")  # "%c-1_i32" is a constant
# "tensor<4x!tt.ptr<f32>, #ttg.blocked<{…}>>", "!tt.ptr<f32>", "i32"; encodings are expanded before matching.
_TYPE = re.compile(
    r"tensor<((?:\d+x)*)(!tt\.ptr<[^>]*>|\w+)(?:, (#.*?))?>(?=[,) ]|$)|(!?\b(?!to\b)[a-z][\w.]*(?:<.*?>(?=[,) ]|$))?)"
)


@functools.lru_cache(64)
def parse(text: str) -> tuple[tuple[str, ...], list[Op]]:
    """Return a kernel's arguments with their types, "%x: !tt.ptr<f32>", and its operations."""
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.M))
    encodings = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)\s*$", text, re.M))
    if text.count("tt.func ") != 1:
        raise NotAnalyzed("the kernel calls a function that is not inlined")
    header, _, body = text[text.index("tt.func ") :].partition("\n")
    body = re.sub(r"#\w+(?![\w.])", lambda match: encodings.get(match[0], match[0]), body)
    ops, _ = _block((line.strip() for line in body.splitlines()), places)
    return tuple(re.findall(r"(%\w+: [^,{)]+)", _LOCATION.sub("", header))), ops


def _source_line(places: Mapping[str, str], place: str) -> str:
    """Follow a location to its source line: "#loc3" is "name"(#loc1), and "#loc1" is "file":12:8."""
    text = places.get(place, "")
    number, inner = re.search(r'":(\d+):', text), re.search(r"#loc\d*", text)
    return f", line {number[1]}" if number else _source_line(places, inner[0]) if inner else ""


def _block(lines: Iterator[str], places: Mapping[str, str]) -> tuple[list[Op], str]:
    """Read operations up to the brace that closes their block. Return the operations and the brace's line."""
    ops: list[Op] = []
    for located in lines:
        place = re.search(r" loc\((#loc\d*)\)$", located)
        line = _LOCATION.sub("", located)
        if line.startswith("}"):
            return ops, line
        match = _OPERATION.match(line)
        if match is None:
            continue
        closing, regions = line, []
        while closing.endswith("{"):
            inner, closing = _block(lines, places)
            regions.append(inner)
        text = match[4] if not regions or ":" not in closing else f"{match[4]} {closing[1:]}"
        head, _, types = text.rpartition(" : ") if " : " in text else (text, "", "")
        results = [match[1]] if match[1] else []
        if match[2]:
            results = [f"{match[1]}#{i}" for i in range(int(match[2]))]
        source_line = _source_line(places, place[1]) if place else ""
        read = tuple(_type(*type_match.groups()) for type_match in _TYPE.finditer(types))
        ops.append(Op(tuple(results), match[3], head, tuple(_NAME.findall(head)), read, source_line, regions))
    return ops, ""


def _type(shape: str | None, element: str | None, encoding: str | None, scalar: str | None) -> Type:
    element = element or scalar or ""
    number = re.search(r"\d+", element)
    bits = int(number[0]) if number else 64
    sizes = tuple(int(size) for size in (shape or "").split("x") if size)
    return Type(sizes, max(1, bits // 8), encoding or "", bits if re.fullmatch(r"i\d+", element) else 0)


# ---- evaluating ------------------------------------------------------------------------------------------------------


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, torch.where(b == 0, 1, b), rounding_mode="trunc")


_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": _quotient, "rem": lambda a, b: a - b * _quotient(a, b),
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "max": torch.maximum,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift, "min": torch.minimum,
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
}  # fmt: skip
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "arith.minsi": torch.amin, "arith.maxsi": torch.amax, "arith.addi": torch.sum,
}  # fmt: skip
_UNCHANGED = {"splat", "broadcast", "expand_dims", "reshape", "trans", "bitcast", "unsplat", "ptr_to_int", "int_to_ptr"}
_UNCHANGED |= {"convert_layout", "extsi", "extui", "trunci", "index_cast", "index_castui"}
_NOT_EVALUATED = {
    "scf.while": "a while loop",
    "tt.call": "a call of a function that is not inlined",
    "tt.descriptor": "a tensor descriptor",
    "tt.make_tensor_desc": "a tensor descriptor",
    "cf.": "an early return",
    "amd": "an access of AMD's backend",
}
_BARRIERS = ("gpu.barrier", "ttg.barrier", "ttg.local_barrier", "ttg.local_load", "ttg.async_wait")


def evaluate(
    text: str, integers: Mapping[str, int], programs: Tensor, grid: Grid, max_iterations: int
) -> tuple[list[Access], int]:
    """Evaluate a kernel in TTGIR for some programs. Programs on different paths have separate accesses.

    Args:
        text: the TTGIR.
        integers: the values of integer arguments by name.
        programs: the numbers of the programs to evaluate.
        grid: the whole launch.
        max_iterations: how many iterations to evaluate at each loop's start, and again at its end. Those at the end
            are skipped if the loop carries an integer to which it does not add a constant.

    Returns:
        The accesses, and the number of evaluated programs: fewer than requested if they take many paths.

    Raises:
        NotAnalyzed: control flow depends on data, or the kernel has an unsupported operation, such as a while loop.
    """
    with torch.device("cpu"):
        try:
            return _Evaluation(text, integers, programs, grid, max_iterations).run(), len(programs)
        except _Divergent as divergence:
            (values,) = divergence.args
    same_path = [programs[values == value] for value in torch.unique(values)]
    if len(same_path) > 2 * _FEW_PATHS:
        same_path = same_path[:_FEW_PATHS] + same_path[-_FEW_PATHS:]
    parts = [evaluate(text, integers, group, grid, max_iterations) for group in same_path]
    return [access for accesses, _ in parts for access in accesses], sum(count for _, count in parts)


def evaluate_launch(text: str, integers: Mapping[str, int], grid: Grid) -> tuple[list[Access], bool]:
    """Evaluate a small launch completely, and some programs of a large one: the first, the last, pairs of neighbors.

    Long loops are evaluated in part (`Access.in_part`), so time and memory are bounded.

    Returns:
        The accesses, and True if all programs were evaluated.

    Raises:
        NotAnalyzed: as for `evaluate`.
    """
    count = math.prod(grid.sizes)
    shapes = re.findall(r"tensor<((?:\d+x)+)!tt\.ptr", text)
    largest = max((math.prod(map(int, shape.split("x")[:-1])) for shape in shapes), default=1)
    with torch.device("cpu"):
        programs = torch.arange(count)
        if count > _FEW_PROGRAMS and count * largest > _MAX_ELEMENTS:
            inner = torch.randint(count - 1, (_FEW_PROGRAMS // 2 - 1,), generator=torch.Generator().manual_seed(0))
            programs = torch.unique(torch.cat([torch.tensor([0, count - 1]), inner, inner + 1]))
    max_iterations = min(16, max(2, 2 * _MAX_ELEMENTS // (len(programs) * largest)))
    accesses, evaluated = evaluate(text, integers, programs, grid, max_iterations)
    return accesses, evaluated == count


_MAX_ELEMENTS = 1 << 18  # in launches with at most this many elements, all programs are evaluated
_FEW_PROGRAMS = 12  # number of programs evaluated in a larger launch
_FEW_PATHS = 8  # of more than 16 paths, only the first 8 and the last 8 are evaluated


class _Evaluation:
    def __init__(
        self,
        text: str,
        integers: Mapping[str, int],
        programs: Tensor,
        grid: Grid,
        max_iterations: int,
    ) -> None:
        self.programs, self.grid, self.max_iterations, self.in_part = programs, grid, max_iterations, False
        self.values: dict[str, Value] = {}
        self.order = self.barriers = 0
        self.accesses: list[Access] = []
        self.crossing: frozenset[str] = frozenset()  # loads that a reduction or conversion passes to other threads
        self.yielded: list[Value] = []
        arguments, self.ops = parse(text)
        for name, kind in (argument.split(": ", 1) for argument in arguments):
            if "!tt.ptr" in kind:
                self.values[name] = Value(torch.zeros(1, dtype=torch.int64), name[1:])
            elif name[1:] in integers:
                self.values[name] = Value(torch.tensor([integers[name[1:]]]))

    def run(self) -> list[Access]:
        self.block(self.ops)
        return [access._replace(crosses_threads=bool(access.value & self.crossing)) for access in self.accesses]

    def block(self, ops: list[Op]) -> None:
        for op in ops:
            self.order += 1
            values = [self.values.get(operand, Value()) for operand in op.operands]
            if op.name == "scf.for":
                self.loop(op)
            elif op.name == "scf.if":
                self.branch(op)
            else:
                loads = frozenset[str]().union(*(value.loads for value in values))
                result = self.operation(op, values, loads)
                self.values |= dict.fromkeys(op.results, result._replace(loads=loads | result.loads))

    def uniform(self, name: str, op: Op) -> int:
        """Return a value that all programs share. Raise `_Divergent` if they differ."""
        data = self.values.get(name, Value()).data
        if data is None:
            subject = "a loop's bounds depend" if op.name == "scf.for" else "a branch's condition depends"
            raise NotAnalyzed(f"{subject} on data{op.line}")
        if (data != data.flatten()[0]).any():
            raise _Divergent(data)
        return int(data.flatten()[0])

    def operation(self, op: Op, values: list[Value], loads: frozenset[str]) -> Value:
        """Return an operation's value if it is an integer or an address; for a load, a value with its name."""
        name = op.name
        first, second = (*values, Value(), Value())[:2]
        for prefix, feature in _NOT_EVALUATED.items():
            if name.startswith(prefix):
                raise NotAnalyzed(f"the kernel has {feature}{op.line}, which is not evaluated")
        if name in ("tt.reduce", "tt.scan"):
            shape, _, encoding, _ = op.types[0]
            if layouts.reduces_across_warps(encoding, shape, _attribute("axis", op), *self.grid[1:]):
                self.barriers += 1
            self.crossing |= loads
            bodies = [_REDUCTIONS.get(inner.name) for region in op.regions for inner in region if "." in inner.name]
            if first.data is not None and len(values) == 1 and bodies[0] is not None and len(bodies) == 2:
                return Value(bodies[0](first.data, 1 + _attribute("axis", op)))
        elif name == "scf.yield":
            self.yielded = values
        elif name in _BARRIERS:
            self.barriers += 1
        elif name == "arith.constant":
            number = re.search(r"(?:dense<|^\s*)(true|false|-?\d+)(?:>|$)", op.text)
            if number is not None:
                fill = {"true": 1, "false": 0}.get(number[1], number[1])
                return Value(torch.full((1, *(op.types[-1].shape if op.types else ())), int(fill)))
        elif name == "tt.get_program_id":
            return Value(self.grid.ids(self.programs)[:, "xyz".index(op.text.split()[0])])
        elif name == "tt.get_num_programs":
            return Value(torch.tensor([self.grid.sizes["xyz".index(op.text.split()[0])]]))
        elif name == "tt.make_range":
            return Value(torch.arange(_attribute("start", op), _attribute("end", op))[None])
        elif name in ("tt.load", "tt.store", "tt.atomic_rmw", "tt.atomic_cas", "ttg.async_copy_global_to_local"):
            return self.access(op, values)
        elif name.partition(".")[2] in _UNCHANGED:
            if name == "ttg.convert_layout" and len(op.types) == 2:
                before, after = op.types
                self.crossing |= loads
                if layouts.crosses_warps(before.encoding, after.encoding, before.shape, *self.grid[1:]):
                    self.barriers += 1
            return self.reshaped(op, first)
        elif name == "tt.elementwise_inline_asm" and "mov.b32" in op.text and len(values) == 1:
            return first  # a copy that hides a value from the compiler
        elif name == "tt.addptr" and first.data is not None and second.data is not None:
            offset = second.data * op.types[0].itemsize
            return Value(first.data + offset, first.argument, _merge_overflow(first, second))
        elif name == "arith.select":
            (condition, _, _, _), yes, no = values
            if condition is not None and yes.data is not None and no.data is not None:
                return Value(torch.where(condition != 0, yes.data, no.data), yes.argument, _merge_overflow(yes, no))
        elif name.startswith("arith.") and len(values) == 2 and first.data is not None and second.data is not None:
            return self.integer(op, first.data, second.data, _merge_overflow(first, second))
        return Value()

    def integer(self, op: Op, a: Tensor, b: Tensor, overflowed: Tensor | None) -> Value:
        """Compute integer arithmetic, and the mask of elements whose 32-bit result overflows."""
        compares = op.name == "arith.cmpi"
        match = re.match(r"\s*[su]?([a-z]{2}),", op.text) if compares else re.match(r"arith\.(\w+?)[su]?i$", op.name)
        if match is None or match[1] not in _BINARY:
            return Value()
        result = _BINARY[match[1]](a, b).long()
        if op.types and op.types[-1].bits == 32 and not compares:
            outside = (result >= 1 << 31) | (result < -(1 << 31))
            if outside.any():
                overflowed = outside if overflowed is None else outside | overflowed
        return Value(result, "", overflowed)

    def reshaped(self, op: Op, value: Value) -> Value:
        """Reshape a value to the operation's result."""
        shape = op.types[-1].shape if op.types else ()

        def shaped(data: Tensor) -> Tensor:
            if op.name == "tt.expand_dims":
                return data.unsqueeze(1 + _attribute("axis", op))
            if op.name == "tt.trans":
                order = re.search(r"array<i32: ([\d, ]+)>", op.text)
                return data.permute(0, *(1 + int(n) for n in (order[1] if order else "1, 0").split(",")))
            if op.name == "tt.splat":
                data = data.reshape(-1, *[1] * len(shape))
            if op.name in ("tt.splat", "tt.broadcast"):
                return data.expand(-1, *shape)
            return data.reshape(-1, *shape) if op.name in ("tt.reshape", "tt.unsplat") else data

        data, overflowed = (part if part is None else shaped(part) for part in (value.data, value.overflowed))
        return Value(data, value.argument, overflowed)

    def access(self, op: Op, values: list[Value]) -> Value:
        """Record an access. For a load, return a value with the load's name."""
        kind = "store" if op.name == "tt.store" else "atomic" if "atomic" in op.name else "load"
        (shape, itemsize, encoding, _), pointer = op.types[0], values[0]
        unknown = torch.ones([1] * (1 + len(shape)), dtype=torch.int64)
        mask_at = 1 if op.name == "tt.load" else 2
        mask = values[mask_at].data if len(values) > mask_at else unknown
        address = unknown if pointer.data is None else pointer.data
        enabled = unknown if mask is None else mask

        def expanded(data: Tensor) -> Tensor:
            return data.expand(-1, *shape).reshape(len(data), -1).expand(len(self.programs), -1)

        result = frozenset(op.results if kind == "load" else ())
        self.accesses.append(
            Access(
                kind,
                self.order,
                pointer.argument,
                expanded(address),
                expanded(enabled) != 0,
                mask is not None,
                itemsize,
                shape,
                encoding,
                f"{op.name} {(*op.results, *op.operands)[0]}{op.line}",
                values[1].loads if kind == "store" else result,
                None if pointer.overflowed is None else expanded(pointer.overflowed),
                self.programs,
                self.barriers,
                self.in_part,
            )
        )
        return Value(loads=result)

    def loop(self, op: Op) -> None:
        (counter, first), *carried = re.findall(r"(%[\w$.]+) = (%[\w$.#-]+)", op.text)
        iterations = range(*(self.uniform(name, op) for name in (first, *op.operands[2:4])))
        names = [name for name, _ in carried]
        self.values |= {name: self.values.get(start, Value()) for name, start in carried}
        most, outside = self.max_iterations, self.in_part
        skips = len(iterations) > 2 * most
        self.in_part |= skips
        before: list[Value] = []
        numbers = range(len(iterations))
        for i in [*numbers[:most], *numbers[len(numbers) - most :]] if skips else numbers:
            if skips and i == len(iterations) - most:  # add the effect of the skipped iterations
                carries = zip(names, op.regions[0][-1].operands, strict=False)
                inside = {counter, *names}
                if not all(self.values[n].data is None or _adds_fixed(op.regions[0], inside, n, y) for n, y in carries):
                    break
                for name, start in zip(names, before, strict=True):
                    value = self.values[name]
                    if value.data is not None and start.data is not None:
                        between = (value.data - start.data) * (len(iterations) - 2 * most)
                        self.values[name] = value._replace(data=value.data + between)
            before = [self.values[name] for name in names]
            self.values[counter] = Value(torch.tensor([iterations[i]]))
            self.block(op.regions[0])
            self.values |= zip(names, self.yielded, strict=False)
        self.in_part = outside
        self.values |= {result: self.values[name] for result, name in zip(op.results, names, strict=False)}

    def branch(self, op: Op) -> None:
        index = 0 if self.uniform(op.operands[0], op) else 1
        if index < len(op.regions):
            self.block(op.regions[index])
            self.values |= zip(op.results, self.yielded, strict=False)


def _adds_fixed(body: list[Op], inside: Collection[str], name: str, yielded: str) -> bool:
    """Return True if every iteration adds the same number to a carried value; ``inside``: names that iterations set."""
    producers = {result: op for op in body for result in op.results}

    def is_fixed(name: str) -> bool:
        op = producers.get(name)
        return name not in inside and (op is None or (not op.regions and all(map(is_fixed, op.operands))))

    op = producers.get(yielded)
    if op is None or op.name not in ("arith.addi", "tt.addptr") or name not in op.operands:
        return yielded == name
    return sum(map(is_fixed, op.operands)) == 1


def _merge_overflow(a: Value, b: Value) -> Tensor | None:
    """Return the mask of elements at which either value has overflowed."""
    if a.overflowed is None or b.overflowed is None:
        return a.overflowed if b.overflowed is None else b.overflowed
    return a.overflowed | b.overflowed


def _attribute(name: str, op: Op) -> int:
    """Read an integer attribute of an operation; 0 if it is missing."""
    match = re.search(rf"{name} = (\d+)", op.text)
    return int(match[1]) if match else 0
