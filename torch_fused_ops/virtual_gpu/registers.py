"""Find registers that NVIDIA's machine code reads before any instruction has written them: a sign of miscompilation.

A forward data flow over the listing records, for each register, the predicates of the writes that may precede an
instruction. A read is reported if no path to it writes the register, or if all writes have the opposite predicate.
Reads without an effect are not reported: copies and spills, parts of a register that a later instruction replaces, and
the upper byte of a pair if only the lower byte is stored. A copy of an unwritten register is unwritten as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;", re.M)
_REGISTER = re.compile(r"(?<![\w.])(U?R|L)(\d+)(\.64|\.F32x2)?(?!\w)")
_PREDICATE = re.compile(r"(?<![\w.])!?(U?P\d)(?!\w)")
_IS_PREDICATE = re.compile(r"!?U?P(?:\d|T)$")
# Instructions that only read their first operand: stores, atomics without a result, copies, branches, barriers.
_NO_RESULT = re.compile(
    r"ST(?!TM)|RED\b|RED\.|BAR|LDGSTS|UTMA|UBLK|BRA|BRX|EXIT|CALL|RET|WARPSYNC|NANOSLEEP|MEMBAR|FENCE|CCTL|ERRBAR|DEPBAR"
    r"|NOP|BSYNC|BSSY|BREAK|YIELD|KILL|BPT|WARPGROUP|CGAERRBAR|ACQBULK|PREEXIT|USETMAXREG|R2P|ARRIVES|SYNCS\.ARRIVE|STTM"
)
# Instructions whose results are all predicates. Other instructions may have a predicate and a register result.
_COMPARISON = re.compile(r"U?[A-Z]*SETP|U?PLOP3|FCHK|U?VOTE|SYNCS|PSETP|ELECT|ISETP|DSETP|HSETP2|TESTP|MATCH")
# Register counts of results whose mnemonic does not end in a size.
_WIDTHS = (
    (re.compile(r"HGMMA|QGMMA|IGMMA|BGMMA|LDTM|UTC"), 128),
    (re.compile(r"[HQI]MMA|DMMA|LDSM.*\.4$"), 4),
    (re.compile(r"LDSM.*\.2$|U?IMAD\.WIDE|D(?:ADD|MUL|FMA|MNMX|SEL)\b|F(?:ADD|MUL|FMA)2\b"), 2),
    (re.compile(r"[FI]2F\.F64|F2I\.[SU]64|MOV64|CS2R(?!\.32)"), 2),
)  # fmt: skip
# Instructions that clear or set one bit, for example of predicates packed into a register.
_ONE_BIT = re.compile(r"LOP3\.LUT (R\d+), \1, 0x(?:(?=.{8},)(?:[edb]f*|f+[edb7]f*), RZ, 0xc0|[1248]0*, RZ, 0xfc)")
_MOVE = re.compile(r"U?MOV$|IMAD\.(?:MOV\.U32|U32|MOV)$")
_PLACE = re.compile(r"\[R1(?:\+0x([0-9a-f]+))?\]$")
_PAIR_OF_BYTES = re.compile(r"F2FP\..*E[45]M[23]\.F32\.PACK_AB")
_STORE_OF_BYTE = re.compile(r"ST[GS]?\..*[US]8")
_UPPER = "the upper byte of "


class _Instruction(NamedTuple):
    address: int
    text: str
    name: str
    guard: str
    operands: tuple[str, ...]
    reads: frozenset[str]
    writes: frozenset[str]
    targets: tuple[int, ...]
    copies: Mapping[str, str]  # target -> source: registers, stack words and upper bytes


def unwritten(listing: str) -> list[tuple[str, str]]:
    """Return (instruction with its address, register) for each read of an unwritten register.

    Return [] if the listing jumps through a table, because its targets are unknown.
    """
    code = _followed([_instruction(match) for match in _LINE.finditer(listing)])
    if not code or any(instruction.name.startswith(("BRX", "JMX")) for instruction in code):
        return []
    successors = _successors(code)
    states: list[dict[str, frozenset[str]] | None] = [None] * len(code)
    states[0] = {}
    waiting = {0}
    while waiting:
        waiting.remove(number := min(waiting))  # in order, so that few instructions are visited twice
        before = states[number]
        assert before is not None
        after = _after(code[number], before)
        for successor in successors[number]:
            known = states[successor]
            joined = after if known is None else _joined(known, after)
            if joined is not known:
                states[successor] = joined
                waiting.add(successor)
    return [
        (f"/*{instruction.address:04x}*/ {instruction.text}", register)
        for instruction, state in zip(code, states, strict=True)
        if state is not None
        for register in sorted(instruction.reads)
        if _is_unwritten(state.get(register, frozenset()), instruction.guard)
    ]


def _followed(code: list[_Instruction]) -> list[_Instruction]:
    """Follow upper bytes of pairs through copies. A load from a stack word without a spill counts as a write."""
    places = {place for i in code if i.name.startswith("STL") for place in (*i.writes, *i.copies)}
    pairs = {to.removeprefix(_UPPER) for i in code for to in i.copies if to.startswith(_UPPER)}
    while new := {to for i in code for to, source in i.copies.items() if source in pairs} - pairs:
        pairs |= new
    result = []
    for i in code:
        if i.name.startswith("LDL") and not places.issuperset(i.copies.values()):
            i = i._replace(writes=i.writes | i.copies.keys(), copies={})
        upper = {_UPPER + to: (_UPPER if source in pairs else "") + source for to, source in i.copies.items()}
        upper = {to: source for to, source in upper.items() if to.removeprefix(_UPPER) in pairs}
        reads = set() if _STORE_OF_BYTE.match(i.name) else {_UPPER + name for name in i.reads & pairs}
        writes = {_UPPER + name for name in i.writes & pairs} - i.copies.keys()
        result.append(i._replace(reads=i.reads | reads, writes=i.writes | writes, copies={**i.copies, **upper}))
    return result


def _is_unwritten(guards: frozenset[str], guard: str) -> bool:
    """Return True if no write under these predicates can precede a read under `guard`."""
    return not guards or (guard != "" and guards == {guard[1:] if guard.startswith("!") else f"!{guard}"})


def _joined(known: dict[str, frozenset[str]], after: dict[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Merge the writes of two paths. Return `known` itself if `after` adds no write."""
    new = {name: guards for name, guards in after.items() if not guards <= known.get(name, frozenset())}
    return known if not new else {**known, **{name: known.get(name, frozenset()) | new[name] for name in new}}


def _after(instruction: _Instruction, before: dict[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    if not instruction.writes and not instruction.copies:
        return before
    after = dict(before)
    predicates = {name for name in instruction.writes if "P" in name}
    for name, guards in before.items() if predicates else ():
        if any(guard.lstrip("!") in predicates for guard in guards):  # the write's predicate has been overwritten
            after[name] = frozenset("" if guard.lstrip("!") in predicates else guard for guard in guards)
    guard = "" if instruction.guard.lstrip("!") in predicates else instruction.guard
    for name in instruction.writes:
        after[name] = frozenset({guard}) | (after.get(name, frozenset()) if guard else frozenset())
    for name, source in instruction.copies.items():
        after[name] = before.get(source, frozenset()) | (before.get(name, frozenset()) if guard else frozenset())
    return after


def _successors(code: list[_Instruction]) -> list[list[int]]:
    numbers = {instruction.address: number for number, instruction in enumerate(code)}
    returns = [number + 1 for number, i in enumerate(code[:-1]) if i.name.startswith("CALL")]
    converge = [numbers[t] for i in code if i.name.startswith("BSSY") for t in i.targets if t in numbers]
    result = []
    for number, instruction in enumerate(code):
        targets = []
        following = [] if number + 1 == len(code) else [number + 1]
        unconditional = instruction.guard in ("", "PT", "UPT") and len(instruction.operands) < 2
        if instruction.name.startswith(("BRA", "CALL", "JMP")):
            targets = [numbers[target] for target in instruction.targets if target in numbers]
        elif instruction.name.startswith("RET"):
            targets = returns
        elif instruction.name.startswith("BSYNC") and number + 1 not in converge:
            targets = converge  # otherwise its target is the next instruction
        if instruction.name.startswith(("EXIT", "BRA", "JMP", "KILL", "RET")) and unconditional:
            following = []
        result.append(following + targets)
    return result


def _instruction(match: re.Match[str]) -> _Instruction:
    address, guard, name, text = int(match[1], 16), match[2] or "", match[3], match[4]
    operands = tuple(operand.strip() for operand in re.split(r",(?![^\[]*\])", text)) if text else ()
    if name.startswith(("STL", "LDL")):  # a stack word counts as a register: [R1+0x8] is L2
        operands = tuple(_PLACE.sub(lambda place: f"L{int(place[1] or '0', 16) // 4}", o) for o in operands)
    results, inputs = _results(name, operands)
    reads = {register for operand in inputs for register in _registers(operand, 1)}
    reads |= {predicate for operand in inputs for predicate in _PREDICATE.findall(operand)}
    reads |= set(_PREDICATE.findall(guard))
    if name.startswith(("STG", "STS", "STL", "ST.")):  # the last operand is the value
        reads |= set(_registers(inputs[-1], _width(name)))
    writes = {predicate for operand in results for predicate in _PREDICATE.findall(operand)}
    writes |= {register for operand in results for register in _registers(operand, _width(name))}
    if name.startswith(("PRMT", "UPRMT", "P2R")) or _ONE_BIT.match(f"{name} {text}"):  # other bits may be unwritten
        reads -= writes
    copies = dict(_copies(name, operands))
    reads, writes = reads - set(copies.values()), writes - copies.keys()
    if name.startswith("R2P"):
        writes |= {f"P{i}" for i in range(7)}
    jumps = re.findall(r"0x([0-9a-f]+)$", text) if name.startswith(("BRA", "BSSY", "CALL", "JMP")) else ()
    targets, guarded = tuple(int(target, 16) for target in jumps), f"@{guard} " if guard else ""
    names, guard = (frozenset(reads), frozenset(writes)), guard.replace("PT", "")
    return _Instruction(address, f"{guarded}{name} {text}", name, guard, operands, *names, targets, copies)


def _copies(name: str, operands: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (target, source) of an instruction's copies: registers, stack words, and the upper byte of a pair."""
    if _PAIR_OF_BYTES.match(name):
        yield from ((_UPPER + to, source) for to in _registers(operands[0], 1) for source in _registers(operands[1], 1))
    elif name.startswith(("STL", "LDL")) and any(operand.startswith("L") for operand in operands):
        yield from zip(*(_registers(operand, _width(name)) for operand in operands), strict=False)
    elif _MOVE.match(name) and {*operands[1:-1]} <= {"RZ", "URZ"} and _REGISTER.fullmatch(operands[-1]):
        yield operands[0], operands[-1]


def _results(name: str, operands: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split operands into the operands that an instruction writes, and the operands that it reads."""
    if not operands or (_NO_RESULT.match(name) and not operands[0].startswith("L")):
        return (), operands
    count = 0
    if _IS_PREDICATE.match(operands[0]):
        limit = 1 if re.match(r"FCHK|U?VOTE|SYNCS|ELECT|MATCH", name) else 2
        while count < min(limit, len(operands)) and _IS_PREDICATE.match(operands[count]):
            count += 1
        if _COMPARISON.match(name):
            return operands[:count], operands[count:]
    count += 1
    selects = re.match(r"U?SEL|FSEL|P2R|U?MOV", name)
    while count < len(operands) and re.match(r"U?P(?:\d|T)$", operands[count]) and not selects:
        count += 1
    return operands[:count], operands[count:]


def _width(name: str) -> int:
    """Return the register count of a result, or of a store's value."""
    size = re.search(r"\.(64|128|256)(?:\.|$)", name)
    if size and not name.startswith(("SHF", "F2", "I2", "LDSM")):
        return int(size[1]) // 32
    return next((width for pattern, width in _WIDTHS if pattern.match(name)), 1)


def _registers(operand: str, width: int) -> Iterator[str]:
    for bank, number, wide in _REGISTER.findall(operand):
        yield from (f"{bank}{int(number) + i}" for i in range(max(width, 2 if wide else 1)))
