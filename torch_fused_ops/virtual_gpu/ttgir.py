"""Evaluation of a kernel's integers: the addresses and masks of its loads and stores, from Triton's TTGIR.

TTGIR is Triton's last form in which an access still names a tensor of addresses, and the first that says which thread
holds which element. Integer operations are evaluated for several programs at once, on tensors (programs, *shape).
Floating-point values are not evaluated; noted is only which loads each of them depends on.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import layouts


class NotAnalyzed(Exception):
    """A kernel has an operation that is not evaluated; the message names it."""


class _Divergent(NotAnalyzed):
    """The programs do not take the same path."""


class Type(NamedTuple):
    """The type of a value."""

    shape: tuple[int, ...] = ()  # of a scalar: ()
    itemsize: int = 0  # bytes of an element
    encoding: str = ""  # the layout
    bits: int = 0  # of an integer


@dataclass
class Op:
    """An operation: what follows its name, without the types, and the operations of its bodies."""

    results: tuple[str, ...]
    name: str
    text: str
    operands: tuple[str, ...] = ()
    types: tuple[Type, ...] = ()  # of operands and results, in the text's order
    regions: list[list[Op]] = field(default_factory=list)


class Value(NamedTuple):
    """An integer, or an address: bytes from a pointer argument's first."""

    data: Tensor  # exact (programs or 1, *shape)
    argument: str = ""
    wrong: Tensor | None = None  # where an integer of 32 bits that it is computed from overflows


class Access(NamedTuple):
    """A load or a store of all evaluated programs; addresses and masks are tensors (programs, elements)."""

    kind: str  # "load", "store" or "atomic"
    order: int  # of execution
    argument: str  # "" where the address is not known
    address: Tensor  # bytes from the argument's first
    active: Tensor  # elements that the mask lets through; all where it is not known
    masked: bool  # the mask is known
    itemsize: int
    shape: tuple[int, ...]  # of the tensor of addresses
    encoding: str
    name: str  # "tt.load %tmp0"
    value: frozenset[str]  # the loads that a store's value depends on; the load itself
    wrong: Tensor | None  # where an overflow has reached the address


@dataclass
class Trace:
    """The accesses of programs (programs, 3) that take the same path, in the order of execution."""

    programs: Tensor
    accesses: list[Access] = field(default_factory=list)
    barriers: list[int] = field(default_factory=list)  # the order of each
    spread: set[str] = field(default_factory=set)  # loads that other threads get, by a reduction or another layout


# ---- reading ---------------------------------------------------------------------------------------------------------

_LOCATION = re.compile(r' loc\((?:[^()"]|"[^"]*"|\([^()]*\))*\)')
_OPERATION = re.compile(r'(?:(%[\w$.]+)(?::(\d+))?(?:, %[\w$.:]+)* = )?"?([a-z_]+[\w.]*)"?(.*)')
_NAME = re.compile(r"%[\w$.]+(?:#\d+)?")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(!tt\.ptr<[^>]*>|\w+)(?:, (.*))?>$")


@functools.lru_cache(64)
def parsed(text: str) -> tuple[tuple[str, ...], list[Op]]:
    """The names of a kernel's arguments with their types, "%x: !tt.ptr<f32>", and its operations."""
    text = _LOCATION.sub("", text)
    encodings = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)\s*$", text, re.M))
    if text.count("tt.func ") != 1:
        raise NotAnalyzed("tt.call")
    header, _, body = text[text.index("tt.func ") :].partition("\n")
    ops, _ = _block(iter(line.strip() for line in body.splitlines()), encodings)
    return tuple(re.findall(r"(%\w+: [^,{)]+)", header)), ops


def _block(lines: Iterator[str], encodings: Mapping[str, str]) -> tuple[list[Op], str]:
    """The operations as far as the brace that closes their block, and its line."""
    ops: list[Op] = []
    for line in lines:
        if line.startswith("}"):
            return ops, line
        if line.startswith("^"):
            ops.append(Op((), "^", re.split(r"[(:]", line)[0]))
            continue
        match = _OPERATION.match(line)
        if match is None:
            continue
        closing, regions = line, []
        while closing.endswith("{"):
            inner, closing = _block(lines, encodings)
            regions.append(inner)
        text = match[4] if not regions or ":" not in closing else f"{match[4]} {closing[1:]}"
        head, _, types = text.rpartition(" : ") if " : " in text else (text, "", "")
        results = [f"{match[1]}#{i}" for i in range(int(match[2]))] if match[2] else [match[1]] if match[1] else []
        read = tuple(_type(part, encodings) for part in _split(types))
        ops.append(Op(tuple(results), match[3], head, tuple(_NAME.findall(head)), read, regions))
    return ops, ""


def _split(types: str) -> Iterator[str]:
    """The single types in "(tensor<4xi32, #a>, i32) -> tensor<4xi32, #a>", "i32 to i64"."""
    depth, part = 0, ""
    for character in types.replace("->", ",").replace(" to ", ","):
        depth += (character in "<{[") - (character in ">}]")
        if character == "," and not depth:
            yield part.strip(" ()")
            part = ""
        else:
            part += character
    if part.strip(" ()"):
        yield part.strip(" ()")


def _type(text: str, encodings: Mapping[str, str]) -> Type:
    match = _TENSOR.match(text)
    shape, element, encoding = match.groups() if match else ("", text, "")
    for _ in range(3):  # a slice names its parent
        encoding = re.sub(r"#\w+(?![\w.])", lambda m: encodings.get(m[0], m[0]), encoding or "")
    number = re.search(r"\d+", element)
    bits = int(number[0]) if number else 64
    sizes = tuple(int(size) for size in shape.split("x") if size)
    return Type(sizes, max(1, bits // 8), encoding, bits if re.fullmatch(r"i\d+", element) else 0)


# ---- evaluating ------------------------------------------------------------------------------------------------------


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, torch.where(b == 0, 1, b), rounding_mode="trunc")


_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": _quotient, "rem": lambda a, b: a - b * _quotient(a, b),
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "max": torch.maximum,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift, "min": torch.minimum,
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
}  # fmt: skip
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {"arith.minsi": torch.amin, "arith.maxsi": torch.amax}
_PASSED_ON = {"splat", "broadcast", "expand_dims", "reshape", "trans", "bitcast", "unsplat", "ptr_to_int", "int_to_ptr"}
_PASSED_ON |= {"convert_layout", "extsi", "extui", "trunci", "index_cast", "index_castui"}
_BARRIERS = ("gpu.barrier", "ttg.barrier", "ttg.local_barrier", "ttg.local_load", "ttg.async_wait")


def evaluated(text: str, integers: Mapping[str, int], programs: Tensor, *launched: Any) -> list[Trace]:
    """Evaluate a kernel in TTGIR for these programs (programs, 3): one trace for those that take the same path.

    Args:
        text: TTGIR.
        integers: values of its integer arguments by name.
        programs: program ids.
        *launched: the grid, threads of a program, threads of a warp, and the most turns of a loop, by default all.

    Raises:
        NotAnalyzed: for control flow that depends on data, and for `tt.call`.
    """
    with torch.device("cpu"):
        try:
            return [_Evaluation(text, integers, programs, *launched).run()]
        except _Divergent:
            if len(programs) == 1:
                raise
        return [_Evaluation(text, integers, alone, *launched).run() for alone in programs.split(1)]


@dataclass
class _Evaluation:
    text: str
    integers: Mapping[str, int]
    programs: Tensor
    grid: tuple[int, ...]
    threads: int
    warp_size: int
    most_turns: int | None = None

    def __post_init__(self) -> None:
        self.values: dict[str, Value | None] = {}
        self.loads: dict[str, frozenset[str]] = {}  # by value, the loads that it depends on
        self.order, self.trace = 0, Trace(self.programs)
        self.yielded: tuple[str, ...] = ()
        arguments, self.ops = parsed(self.text)
        for name, kind in (argument.split(": ", 1) for argument in arguments):
            if "!tt.ptr" in kind:
                self.values[name] = Value(torch.zeros(1, dtype=torch.int64), name[1:])
            elif name[1:] in self.integers:
                self.values[name] = Value(torch.tensor([self.integers[name[1:]]]))

    def run(self) -> Trace:
        """Run the function's blocks, which end in a branch or a return."""
        blocks: dict[str, list[Op]] = {"": []}
        for op in self.ops:
            blocks.setdefault(op.text, []) if op.name == "^" else next(reversed(blocks.values())).append(op)
        label = ""
        for _ in blocks:
            last = self.block(blocks[label])
            targets = re.findall(r"\^\w+", last.text) if last else []
            if last is None or not targets:
                return self.trace
            if "(" in last.text.replace("()", ""):
                raise NotAnalyzed(f"{last.name} with arguments")
            label = targets[0] if len(targets) == 1 or self.uniform(last.operands[0], last.name) else targets[1]
        raise NotAnalyzed("a loop of branches")

    def block(self, ops: list[Op]) -> Op | None:
        for op in ops:
            self.order += 1
            if op.name.startswith("cf."):
                return op
            depends = frozenset[str]().union(*(self.loads.get(name, frozenset()) for name in op.operands))
            result, depends = self.operation(op, depends)
            if not op.name.startswith("scf."):  # which set theirs
                self.values |= dict.fromkeys(op.results, result)
                self.loads |= dict.fromkeys(op.results, depends)
        return None

    def uniform(self, name: str, what: str) -> int:
        """A value that is the same in all programs."""
        value = self.values.get(name)
        if value is None:
            raise NotAnalyzed(f"{what} of a value that depends on data")
        if (value.data != value.data.flatten()[0]).any():
            raise _Divergent(what)
        return int(value.data.flatten()[0])

    def operation(self, op: Op, depends: frozenset[str]) -> tuple[Value | None, frozenset[str]]:
        """The value of an operation where it is an integer or an address, and the loads that it depends on."""
        name, values = op.name, [self.values.get(operand) for operand in op.operands]
        first = values[0] if values else None
        if name == "scf.for":
            return self.loop(op)
        if name == "scf.if":
            return self.branch(op)
        if name in ("scf.while", "tt.call") or name.startswith("tt.descriptor"):
            raise NotAnalyzed(name)
        if name in ("tt.reduce", "tt.scan"):
            shape, _, encoding, _ = op.types[0]
            if layouts.reduces_across_warps(encoding, shape, _number("axis", op), self.threads, self.warp_size):
                self.trace.barriers.append(self.order)
            self.trace.spread |= depends
            bodies = [_REDUCTIONS.get(inner.name) for region in op.regions for inner in region if "." in inner.name]
            if first is not None and len(values) == 1 and bodies[0] is not None and len(bodies) == 2:
                return Value(bodies[0](first.data, 1 + _number("axis", op))), depends
        elif name == "scf.yield":
            self.yielded = op.operands
        elif name in _BARRIERS:
            self.trace.barriers.append(self.order)
        elif name == "arith.constant":
            number = re.search(r"(?:dense<|^\s*)(true|false|-?\d+)(?:>|$)", op.text)
            if number is not None:
                fill = {"true": 1, "false": 0}.get(number[1], number[1])
                return Value(torch.full((1, *(op.types[-1].shape if op.types else ())), int(fill))), depends
        elif name == "tt.get_program_id":
            return Value(self.programs[:, "xyz".index(op.text.split()[0])]), depends
        elif name == "tt.get_num_programs":
            return Value(torch.tensor([self.grid["xyz".index(op.text.split()[0])]])), depends
        elif name == "tt.make_range":
            return Value(torch.arange(_number("start", op), _number("end", op))[None]), depends
        elif name in ("tt.load", "tt.store", "tt.atomic_rmw", "tt.atomic_cas", "ttg.async_copy_global_to_local"):
            return None, depends | self.access(op, values)
        elif name.partition(".")[2] in _PASSED_ON:
            if name == "ttg.convert_layout" and len(op.types) == 2:
                before, after = op.types
                self.trace.spread |= depends
                if layouts.crosses_warps(before.encoding, after.encoding, before.shape, self.threads, self.warp_size):
                    self.trace.barriers.append(self.order)
            return first and self.reshaped(op, first), depends
        elif name == "tt.elementwise_inline_asm" and "mov.b32" in op.text and len(values) == 1:
            return first, depends  # a copy that hides a value from the compiler
        elif name == "tt.addptr" and first is not None and values[1] is not None:
            offset = values[1].data * op.types[0].itemsize
            return Value(first.data + offset, first.argument, _either(first, values[1])), depends
        elif name == "arith.select" and all(value is not None for value in values):
            condition, yes, no = (value for value in values if value is not None)
            return Value(torch.where(condition.data != 0, yes.data, no.data), yes.argument, _either(yes, no)), depends
        elif name.startswith("arith.") and len(values) == 2 and first is not None and values[1] is not None:
            return self.integer(op, first, values[1]), depends
        return None, depends

    def integer(self, op: Op, a: Value, b: Value) -> Value | None:
        """The result of arithmetic on integers, with the places where one of 32 bits overflows."""
        compares = op.name == "arith.cmpi"
        match = re.match(r"\s*[su]?([a-z]{2}),", op.text) if compares else re.match(r"arith\.(\w+?)[su]?i$", op.name)
        if match is None or match[1] not in _BINARY:
            return None
        result, wrong = _BINARY[match[1]](a.data, b.data).long(), _either(a, b)
        if op.types and op.types[-1].bits == 32 and not compares:
            outside = (result >= 1 << 31) | (result < -(1 << 31))
            if outside.any():
                wrong = outside if wrong is None else outside | wrong
        return Value(result, "", wrong)

    def reshaped(self, op: Op, value: Value) -> Value:
        """A value in the shape of the operation's result."""
        shape = op.types[-1].shape if op.types else ()

        def shaped(data: Tensor) -> Tensor:
            if op.name == "tt.expand_dims":
                return data.unsqueeze(1 + _number("axis", op))
            if op.name == "tt.trans":
                order = re.search(r"array<i32: ([\d, ]+)>", op.text)
                return data.permute(0, *(1 + int(n) for n in (order[1] if order else "1, 0").split(",")))
            if op.name == "tt.splat":
                data = data.reshape(-1, *[1] * len(shape))
            if op.name in ("tt.splat", "tt.broadcast"):
                return data.expand(-1, *shape)
            return data.reshape(-1, *shape) if op.name in ("tt.reshape", "tt.unsplat") else data

        return Value(shaped(value.data), value.argument, None if value.wrong is None else shaped(value.wrong))

    def access(self, op: Op, values: list[Value | None]) -> frozenset[str]:
        """Note an access; returns the loads that its result is."""
        kind = "store" if op.name == "tt.store" else "atomic" if "atomic" in op.name else "load"
        (shape, itemsize, encoding, _), pointer = op.types[0], values[0]
        *_, mask = values[: 2 if op.name == "tt.load" else 3]
        has_mask = len(values) > (1 if op.name == "tt.load" else 2)
        count = len(self.programs), math.prod(shape)

        def whole(data: Tensor) -> Tensor:
            return data.expand(-1, *shape).reshape(-1, count[1]).expand(count)

        scalar = [1] * (1 + len(shape))
        active = mask.data != 0 if mask and has_mask else torch.ones(scalar, dtype=torch.bool)
        address, argument, wrong = pointer or Value(torch.zeros(scalar, dtype=torch.int64))
        reads = frozenset(op.results if kind == "load" else ())
        stored = self.loads.get(op.operands[1], frozenset()) if kind == "store" else frozenset[str]()
        name = f"{op.name} {(*op.results, *op.operands)[0]}"
        places = whole(address), whole(active), mask is not None or not has_mask, itemsize, shape, encoding
        overflow = None if wrong is None else whole(wrong)
        self.trace.accesses.append(Access(kind, self.order, argument, *places, name, reads or stored, overflow))
        return reads

    def loop(self, op: Op) -> tuple[Value | None, frozenset[str]]:
        (counter, first), *carried = re.findall(r"(%[\w$.]+) = (%[\w$.#]+)", op.text)
        low, high, step = (self.uniform(name, "scf.for") for name in (first, *op.operands[2:4]))
        for name, start in carried:
            self.values[name], self.loads[name] = self.values.get(start), self.loads.get(start, frozenset())
        for number in itertools.islice(range(low, high, step), self.most_turns):
            self.values[counter] = Value(torch.tensor([number]))
            self.block(op.regions[0])
            ends = [(self.values.get(end), self.loads.get(end, frozenset())) for end in self.yielded]
            for (name, _), (value, loads) in zip(carried, ends, strict=False):
                self.values[name], self.loads[name] = value, loads
        for result, (name, _) in zip(op.results, carried, strict=False):
            self.values[result], self.loads[result] = self.values[name], self.loads[name]
        return None, frozenset()

    def branch(self, op: Op) -> tuple[Value | None, frozenset[str]]:
        taken = 0 if self.uniform(op.operands[0], "scf.if") else 1
        if taken < len(op.regions):
            self.block(op.regions[taken])
            for result, end in zip(op.results, list(self.yielded), strict=False):
                self.values[result], self.loads[result] = self.values.get(end), self.loads.get(end, frozenset())
        return None, frozenset()


def _either(a: Value, b: Value) -> Tensor | None:
    """The places where either value is wrong."""
    if a.wrong is None or b.wrong is None:
        return a.wrong if b.wrong is None else b.wrong
    return a.wrong | b.wrong


def _number(name: str, op: Op) -> int:
    """An attribute of an operation."""
    match = re.search(rf"{name} = (\d+)", op.text)
    return int(match[1]) if match else 0
