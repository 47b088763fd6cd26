"""Read PyTorch's memory snapshots: group the memory alive at the failure or at the peak, and suggest settings.

``torch.cuda.memory._dump_snapshot`` writes a pickle of segments with blocks, and of traces of allocations, as the
docstring of ``torch.cuda.memory._snapshot`` describes. A block's frames, size and lifetime tell its kind. PyTorch's
own backward functions run without Python code, so their allocations have no Python frames.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import json
import logging
import os
import pickle
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch_fused_ops.graphs.listing import SavedRow
from torch_fused_ops.reports.page import template
from torch_fused_ops.reports.saved import Saved
from torch_fused_ops.reports.text import aligned, size
from torch_fused_ops.settings.environment import writable

log = logging.getLogger("torch_fused_ops.snapshot")

PARAMETERS, STATE, GRADIENTS = "parameters", "optimizer state", "gradients"
ACTIVATIONS, RECOMPUTED, LOGITS = "saved activations", "recomputed by a checkpoint", "logits and their copies"
TEMPORARY, INPUTS, OTHER = "temporaries", "inputs", "other"
EARLIER, OLD_GRADIENTS = "allocated before the recording", "gradients of an earlier backward"
# Categories that a file may record for a block, as PyTorch's profiler does (``_memory_viz._profile_to_snapshot``).
_CATEGORIES = {
    "parameter": PARAMETERS, "optimizer_state": STATE, "gradient": GRADIENTS, "activation": ACTIVATIONS,
    "temporary": TEMPORARY, "autograd_detail": TEMPORARY, "input": INPUTS,
}  # fmt: skip
_BACKWARD, _FORWARD = "backward", "forward"  # phases in which several kinds are allocated
# The first row whose pattern matches one of the frames, "file:function", counts.
_PHASES = (
    (STATE, r"/torch/optim/|/optim(izers?)?/[^:]*:step$"),
    (RECOMPUTED, r"/torch/utils/checkpoint\.py:(unpack_hook|recompute_fn|backward)$"),
    (_BACKWARD, r"/torch/(autograd/|_tensor\.py)[^:]*:(backward|_engine_run_backward|apply)$|torch::autograd::Engine"),
    (LOGITS, r":(\w*cross_entropy\w*|nll_loss|log_softmax|\w*[lL]oss\w*)$|/modules/loss\.py:"),
    (_FORWARD, r":(forward|_call_impl|call)$"),
    (PARAMETERS, r":(from_pretrained|load_state_dict|_apply|to|cuda|to_empty|__init__|reset_parameters)$"),
)
_LIBRARY = re.compile(r"/torch/|/torchinductor_|<|\.(cpp|cu|h|c)$|^\?*$|/(accelerate|torch_fused_ops|triton)/")
_BYTES_FOR_BYTE = 24  # a loaded snapshot takes 7 to 15 bytes for each byte of its file (Python 3.11)


class _Unpickler(pickle.Unpickler):
    """Load containers, numbers and strings only, so that a file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}: a snapshot has containers, numbers and strings only")


class _Progress(io.BufferedReader):
    """A file that logs its progress after each 64 MiB."""

    def read(self, count: int | None = -1) -> bytes:
        before = self.tell() >> 26
        data = super().read(count)
        if self.tell() >> 26 > before:
            log.info("%s were read", size(self.tell()))
        return data


@contextlib.contextmanager
def _bounded(nbytes: int) -> Iterator[None]:
    """On Linux, raise MemoryError in this block if the process needs ``nbytes`` more than before, or more than is free.

    Allow 256 MiB in addition.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    nbytes = min(nbytes, os.sysconf("SC_AVPHYS_PAGES") * resource.getpagesize()) + (1 << 28)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = limits[1] if limits[1] != resource.RLIM_INFINITY else mapped + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (min(mapped + nbytes, hard), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def load(path: str | Path) -> dict[str, Any]:
    """Load a snapshot without running code from the file.

    On Linux, it may take 24 times the file's size and 256 MiB of memory, not more.

    ``read_snapshot`` took 76 s of processor time and 3.4 GiB for a file of 504 MB with 6.3 million events.

    Raises:
        ValueError: the file cannot be read, is not a snapshot, or needs more memory than is free.
    """
    try:
        total = os.path.getsize(path)
        with _Progress(io.FileIO(path)) as file, _bounded(_BYTES_FOR_BYTE * total):
            data: dict[str, Any] = _Unpickler(file).load()
        for entry in (*itertools.chain(*data["device_traces"]), *data["segments"]):
            _ = entry["action"] if "action" in entry else [block["requested_size"] + 0 for block in entry["blocks"]]
        return data
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except MemoryError:
        advice = "Record less: _record_memory_history(max_entries=100_000)"
        raise ValueError(f"{path}, {size(total)}, is damaged or too large. {advice}") from None
    except Exception as error:  # a damaged pickle raises almost anything
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is not a snapshot of torch.cuda.memory, or is truncated ({why})") from None


class Block(NamedTuple):
    """A piece of memory, and the numbers of the events that allocate and free it."""

    nbytes: int  # requested
    start: int  # -1: before the trace
    end: int  # length of the trace: not freed
    frames: Sequence[Mapping[str, Any]] = ()
    category: str = ""


class Device:
    """A device's trace and segments in a snapshot.

    Attributes:
        number: the device's index.
        trace: the events, the oldest first; empty without ``_record_memory_history``.
        segments: the allocator's segments when the file was written.
        blocks: every block in the order of release, then the blocks alive at the end.
        failure: the number of the last request that failed; None if none did.
    """

    def __init__(self, number: int, trace: Sequence[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]]) -> None:
        self.number, self.trace, self.segments = number, trace, segments
        self.blocks: list[Block] = []
        self.failure = next((i for i in reversed(range(len(trace))) if trace[i]["action"] == "oom"), None)
        alive: dict[int, Block] = {}

        def block_of(entry: Mapping[str, Any], nbytes: int, start: int) -> Block:
            return Block(nbytes, start, len(trace), entry.get("frames", ()), entry.get("category", ""))

        for i, event in enumerate(trace):
            if event["action"] == "alloc":
                alive[event["addr"]] = block_of(event, event["size"], i)
            elif event["action"] == "free_completed":
                block = alive.pop(event["addr"], Block(event["size"], -1, i))
                self.blocks.append(block._replace(end=i))
        for entry in (block for segment in segments for block in segment["blocks"]):
            if entry["state"] != "inactive":
                alive.setdefault(entry["address"], block_of(entry, entry["requested_size"], -1))
        self.blocks += alive.values()

    def live_bytes(self) -> list[int]:
        """Return the bytes alive before the first event, and after each event."""
        changes = [0] * (len(self.trace) + 2)
        for block in self.blocks:
            changes[block.start + 1] += block.nbytes
            changes[block.end + 1] -= block.nbytes
        return list(itertools.accumulate(changes[:-1]))


def kinds_of(device: Device, at: int, sizes: Counter[int]) -> list[tuple[Block, str]]:
    """Return the blocks alive after event ``at``, each with its kind.

    Args:
        device: the device.
        at: the event's number.
        sizes: the number of the model's parameters of each size in bytes; empty if unknown.
    """
    by_stack: dict[int, str] = {}  # equal stack traces of a pickle are one object

    def phase_of(block: Block) -> str:
        """Return the phase of a step in which a block is allocated."""
        if not block.frames:
            return EARLIER if block.start < 0 else _BACKWARD  # the autograd engine's thread
        if id(block.frames) not in by_stack:
            texts = [f"{frame.get('filename', '')}:{frame.get('name', '')}" for frame in block.frames]
            matches = (phase for phase, pattern in _PHASES if any(re.search(pattern, text) for text in texts))
            by_stack[id(block.frames)] = next(matches, OTHER)
        return by_stack[id(block.frames)]

    started: dict[str, list[int]] = defaultdict(list)
    for block in sorted(device.blocks, key=lambda b: b.start):
        started[phase_of(block)].append(block.start)

    def reaches(block: Block, *phases: str) -> bool:
        """Return True if the block is alive when one of the phases next allocates, or if it is never freed."""
        between = (bisect.bisect_left(started[p], block.end) - bisect.bisect(started[p], block.start) for p in phases)
        return block.end == len(device.trace) or any(count > 0 for count in between)

    alive = sorted((b for b in device.blocks if b.start <= at < b.end), key=lambda b: b.start)
    unmatched = sizes or Counter(b.nbytes for b in alive if phase_of(b) in (PARAMETERS, EARLIER))
    parameters, gradients = Counter(unmatched), Counter(unmatched)
    result: list[tuple[Block, str]] = []
    for block in alive:
        kind = phase_of(block)
        if block.category in _CATEGORIES:
            kind = _CATEGORIES[block.category]
        elif kind == STATE and not any(frame["name"] == "_init_group" for frame in block.frames):
            kind = STATE if block.end < len(device.trace) and reaches(block, _FORWARD) else TEMPORARY
        elif kind == _BACKWARD:
            kind = GRADIENTS if gradients[block.nbytes] > 0 and reaches(block, STATE, _FORWARD) else TEMPORARY
            gradients[block.nbytes] -= kind == GRADIENTS
        elif kind == _FORWARD:
            kind = ACTIVATIONS if reaches(block, _BACKWARD) else TEMPORARY
        elif kind == LOGITS and result and block.nbytes in (result[-1][0].nbytes, 2 * result[-1][0].nbytes):
            result[-1] = result[-1][0], LOGITS  # the head's result, which the loss copies in float32
        elif kind == EARLIER and sizes and parameters[block.nbytes] > 0:
            kind, parameters[block.nbytes] = PARAMETERS, parameters[block.nbytes] - 1
        result.append((block, kind))
    forward = min((block.start for block, kind in result if kind == ACTIVATIONS), default=-1)
    return [(b, OLD_GRADIENTS if kind == GRADIENTS and b.start < forward else kind) for b, kind in result]


@dataclass(frozen=True)
class Group:
    """Tensors of one kind, allocated by the same line or module."""

    kind: str
    where: str  # a saved tensor's module if the model is given, else the innermost line outside of libraries, or ""
    nbytes: int
    count: int
    setting: str = ""  # the settings that avoid saving these tensors, or the reason why they stay; with the model only


@dataclass(frozen=True)
class SnapshotReport:
    """The memory alive at the failure, or else at the peak, on one device. Printable.

    Attributes:
        moment: a sentence: when, and how many bytes.
        live: bytes alive then, as requested.
        reserved: bytes of all segments when the file was written.
        unused: bytes of free blocks in these segments.
        largest: bytes of the largest free block.
        requested: bytes of the request that failed; None without a failure.
        groups: the tensors, the largest groups first.
        advice: a sentence for each setting that helps, and for expandable segments; then remarks on the file.
        compared: (part, bytes here, planned bytes) with a plan, the largest difference first.
    """

    moment: str
    live: int
    reserved: int
    unused: int
    largest: int
    requested: int | None
    groups: tuple[Group, ...]
    advice: tuple[str, ...] = ()
    compared: tuple[tuple[str, int, int], ...] = ()

    def nbytes(self, *kinds: str) -> int:
        """Return the bytes of these kinds."""
        return sum(group.nbytes for group in self.groups if group.kind in kinds)

    def kinds(self) -> dict[str, int]:
        """Return the bytes of each kind, the largest first."""
        totals = {group.kind: self.nbytes(group.kind) for group in self.groups}
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def tables(self) -> Iterator[Sequence[tuple[str, ...]]]:
        """Yield the report's tables. The first row of each is its heading."""
        totals = ((kind, size(n), f"{n / max(self.live, 1):.0%}") for kind, n in self.kinds().items())
        yield [("alive", "bytes", "share"), *totals]
        groups = [group for group in self.groups if group.where and group.nbytes >= self.live / 200][:20]
        rows = [(f"{g.kind}: {g.where}{g.setting and ': '}{g.setting}", str(g.count), size(g.nbytes)) for g in groups]
        if rows:
            yield [("the largest groups", "tensors", "bytes"), *rows]
        parts = [(name, size(a), size(b), f"{a / b - 1:+.1%}" if b else "") for name, a, b in self.compared]
        if parts:
            yield [("compared with the plan", "snapshot", "plan", "difference"), *parts]

    def __str__(self) -> str:
        tables = itertools.chain.from_iterable([*aligned(table), ""] for table in self.tables())
        return "\n".join([self.moment, "", *tables, *self.advice])

    def to_json(self) -> str:
        """Convert the attributes to JSON."""
        return json.dumps(asdict(self), indent=1)

    def to_html(self, path: str | Path) -> None:
        """Write the report as one self-contained page.

        Raises:
            ValueError: path cannot be written.
        """
        page = template("reports/snapshot.html", {"size": size}).render(report=self)
        writable(f"path={str(path)!r}", path).write_text(page, encoding="utf-8")


def read_snapshot(
    path: str | Path, *, saved: Saved | None = None, parameters: Iterable[int] = (), plan: Path | None = None
) -> SnapshotReport:
    """Explain a memory snapshot: the memory alive at a failed request, or else at the peak, and settings to shrink it.

    Args:
        path: a file that ``torch.cuda.memory._dump_snapshot`` or ``Plan.to_snapshot`` wrote.
        saved: the model's saved tensors, ``explain(model, …).saved``, matched with saved activations by size.
        parameters: bytes of each of the model's parameters.
        plan: a file of ``Plan.to_json`` or ``Plan.to_snapshot``, to compare.

    Raises:
        ValueError: a file is not a snapshot or a plan, or nothing is allocated in it.
    """
    data = load(path)
    segments: dict[int, list[Any]] = defaultdict(list)
    for segment in data["segments"]:
        segments[segment.get("device", 0)].append(segment)
    traces = dict(enumerate(data["device_traces"]))
    devices = [Device(number, traces.get(number, ()), segments[number]) for number in sorted({*traces, *segments})]
    peaks = {device: max(device.live_bytes()) for device in devices if device.blocks}
    if not peaks:
        raise ValueError(f"{path} has no allocated memory: write it in the process that trains, before it ends")
    device = max(peaks, key=lambda d: (d.failure is not None, peaks[d]))
    failed = None if device.failure is None else device.trace[device.failure]
    at = device.live_bytes().index(peaks[device]) - 1 if device.failure is None else device.failure
    alive = kinds_of(device, at, Counter(parameters))
    live = sum(block.nbytes for block, _ in alive)
    free = [b["size"] for segment in device.segments for b in segment["blocks"] if b["state"] == "inactive"]
    when = f"when {size(failed['size'])} more were requested" if failed else "at the peak"
    place = f"event {at + 1:,} of {len(device.trace):,}" if device.trace else "when the file was written"
    report = SnapshotReport(
        moment=f"{path}, device {device.number}: {size(live)} alive {when} ({place})",
        live=live,
        reserved=sum(segment["total_size"] for segment in device.segments),
        unused=sum(free),
        largest=max(free, default=0),
        requested=failed["size"] if failed else None,
        groups=tuple(_grouped(alive, saved)),
    )
    other_peaks = ", ".join(f"{d.number}: {size(peak)}" for d, peak in peaks.items() if d is not device)
    advice = *_advice(report, device, saved), *_remarks(report, device, at, other_peaks)
    return replace(report, advice=advice, compared=tuple(_compared(report, plan)) if plan else ())


def _grouped(alive: Iterable[tuple[Block, str]], saved: Saved | None) -> Iterator[Group]:
    """Group tensors by kind and place, the largest groups first."""
    rows: dict[int, list[SavedRow]] = defaultdict(list)  # size of a tensor -> a row for each tensor
    for row in saved.rows if saved else ():
        rows[row.nbytes // row.count] += [row] * row.count
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for block, kind in alive:
        where, setting = next(filter(None, map(_line, block.frames)), ""), ""
        if kind == ACTIVATIONS and rows[block.nbytes]:
            row = rows[block.nbytes].pop(0)
            where, setting = f"{row.module} {row.dtype}{list(row.shape)}", row.advice
        groups[kind, where, setting].append(block.nbytes)
    for (kind, where, setting), sizes in sorted(groups.items(), key=lambda item: -sum(item[1])):
        yield Group(kind, where, sum(sizes), len(sizes), setting)


def _line(frame: Mapping[str, Any]) -> str:
    """Return "file:line function" of a frame outside of libraries, or a planned block's module; "" for other frames."""
    file, name = str(frame.get("filename", "")), frame.get("name", "")
    place = f"{'/'.join(file.split('/')[-2:])}:{frame['line']} " if frame.get("line") else ""
    return "" if _LIBRARY.search(file) else f"{place}{name}"


def _advice(report: SnapshotReport, device: Device, saved: Saved | None) -> Iterator[str]:
    """Yield a sentence for each setting that would help, with bytes, and for expandable segments."""
    activations, recomputed, logits, old = map(report.nbytes, (ACTIVATIONS, RECOMPUTED, LOGITS, OLD_GRADIENTS))
    state = report.nbytes(PARAMETERS, STATE, GRADIENTS)
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (ROCm: PYTORCH_HIP_ALLOC_CONF)"
    if any(segment.get("is_expandable") for segment in device.segments):
        yield f"Expandable segments are on already; {size(report.unused)} are free inside segments."
    elif report.requested and report.largest < report.requested <= report.unused:
        pieces = f"{size(report.unused)} are free, in pieces of up to {size(report.largest)}"
        yield f"With {setting} the request fits: {pieces}."
    elif report.requested and report.requested > report.unused:
        yield f"{setting} would not be enough: only {size(report.unused)} are free inside segments."
    elif report.unused > report.reserved / 20:
        yield f"{setting} can return up to {size(report.unused)} that are free inside segments."
    if saved is not None and activations:
        yield from (f"{name}: {size(saved.nbytes - n)} less saved for backward." for name, n in saved.totals.items())
    levels = "memory levels and offload shrink them. Name the model, MODULE:CALLABLE, to see which tensors"
    chunks = "return the loss alone, or compute it in chunks (docs/out-of-memory.md)"
    rows = (
        (activations if saved is None else 0, "Saved activations, {}: " + levels),
        (recomputed, "A checkpoint recomputed {}: checkpoints around smaller parts recompute less at once"),
        (logits, "Logits and copies, {}: " + chunks),
        (old, "optimizer.zero_grad(set_to_none=True) before forward frees {}, except while accumulating"),
        (state * 7 / 8, "FSDP2 on 8 GPUs shards parameters, gradients and state: {} less on each"),
        ((activations + logits) / 2, "Half the batch or the sequence needs about {} less"),
    )
    yield from (f"{text.format(size(nbytes))}." for nbytes, text in rows if nbytes)


def _remarks(report: SnapshotReport, device: Device, at: int, other_peaks: str) -> Iterator[str]:
    """Yield remarks on missing records and on memory that the figures leave out."""
    record, trace, early = "torch.cuda.memory._record_memory_history()", device.trace, report.nbytes(EARLIER)
    failed = trace[device.failure] if device.failure is not None else {}
    private = [s["total_size"] for s in device.segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    has_frames = any(event.get("frames") for event in trace if event["action"] == "alloc")
    elsewhere = "Other processes, the CUDA context, or memory outside of a MIG instance may take the rest"
    free = failed.get("device_free", 0)
    rows = (
        (
            not trace,
            f"The file has no trace, so it shows the moment when it was written. Call {record} before training.",
        ),
        (trace and not has_frames, f"Allocations have no stack traces. Call {record} with its defaults."),
        (early, f"{size(early)} were allocated before the recording. Call {record} before the model is created."),
        (0 < at + 1 < len(trace), f"Reserved and free bytes were counted {len(trace) - at - 1:,} events later."),
        (failed, f"{size(report.reserved)} reserved and {size(free)} free on the device. {elsewhere}."),
        (
            private,
            f"{size(sum(private))} are in private pools, such as CUDA graphs'. Other allocations cannot use them.",
        ),
        (other_peaks, f"Other devices have allocations, too (device: peak): {other_peaks}."),
    )
    yield from (f"note: {text}" for applies, text in rows if applies)


def _compared(report: SnapshotReport, plan: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (part, bytes here, planned bytes), the largest difference first."""
    in_step, measured = "activations, gradients and temporaries", report.kinds()
    try:
        figures = json.loads(plan.read_text())
        planned = {PARAMETERS: figures["parameters"], STATE: figures["optimizer_state"]}
        planned |= {in_step: figures["step_peak"] - sum(planned.values()), "reserved": figures["reserved_bytes"]}
        measured["reserved"] = report.reserved
        resident = {PARAMETERS, STATE, EARLIER, "reserved"}
        measured[in_step] = sum(measured.pop(kind) for kind in set(measured) - resident)
    except UnicodeDecodeError:
        planned = read_snapshot(plan).kinds()
    except (OSError, json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{plan} is not a plan: write it with plan --json or plan --snapshot") from None
    if EARLIER in measured:  # it may be parameters or state: compare their sum
        for part in (measured, planned):
            part[f"{PARAMETERS}, {STATE}"] = sum(part.pop(kind, 0) for kind in (PARAMETERS, STATE, EARLIER))
    rows = [(name, measured.get(name, 0), planned.get(name, 0)) for name in {**measured, **planned}]
    yield from sorted(rows, key=lambda row: -abs(row[1] - row[2]))
