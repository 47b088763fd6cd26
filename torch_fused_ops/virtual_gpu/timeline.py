"""Compute the live-bytes timeline of a step by running Inductor's generated wrapper on meta tensors.

The wrapper is Python code that manages buffers and launches kernels. On meta tensors, which have sizes but no data, the
wrapper runs on any machine. Kernels do nothing, library calls return `out`, and other operators run on meta. A storage
counts while it is alive, so Python's lifetimes account for frees, views and reuse.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from .gpus import GPU
from .results import GeneratedGraph, GeneratedKernel, GraphInput, Launch, SavedTensor
from .work import flop_of_bf16, is_view
from .wrapper import called

aten = torch.ops.aten


@dataclass(frozen=True)
class Event:
    """A kernel launch or an external call, in the order of execution.

    Attributes:
        graph: "forward", "backward" or "inference".
        call: the name of the kernel or operator: "triton_poi_fused_gelu_0", "addmm".
        live: the most bytes alive between the end of the previous call and the end of this call.
        after: bytes alive after the call, once tensors without later readers are freed.
        waiting: bytes of `after` that are not read again; Inductor reuses their memory for a later result.
        nbytes: bytes that the call reads and writes (`Launch.bytes_moved`).
        flop: FLOP of GEMMs and attention, counted by `work.flop_of_bf16`.
        modules: see `Launch.modules`.
    """

    graph: str
    call: str
    live: int
    after: int
    waiting: int
    nbytes: int
    flop: float
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Copy:
    """A copy between the device and the host, on its own stream. Copies run one after the other.

    Attributes:
        nbytes: size in bytes.
        queued: the number of the call at which the copy may begin, when all earlier calls and copies have ended.
        awaited: the number of the call that begins only after the copy.
    """

    nbytes: int
    queued: int
    awaited: int


@dataclass(frozen=True)
class Stored:
    """Memory that a forward graph computes and saves for backward, and that backward frees.

    The attributes after ``saved`` are numbers of calls.

    Attributes:
        nbytes: size in bytes.
        saved: a tensor with this memory.
        ready: the first GEMM or attention that reads it, or else the call after its last use in forward.
        ends: the call after the forward graph.
        starts: the first call of the backward graph.
        read: the first call of backward that reads it.
    """

    nbytes: int
    saved: SavedTensor
    ready: int
    ends: int
    starts: int
    read: int


@dataclass(frozen=True)
class Timeline:
    """The bytes alive during forward and backward: gradients count, parameters and buffers do not.

    Attributes:
        events: the calls, in order.
        entry: bytes alive before the first call: the function's inputs.
        between: bytes alive between forward and backward: inputs, results and saved tensors.
        end: bytes alive after the last call: inputs, results and gradients.
        log: (call, storage, bytes) for each allocated storage, and with negative bytes for each freed storage.
        gradients: maps (graph, input) of a parameter to its gradient's allocation: the number of the call, and the
            bytes. If gradients share a storage, the first has all bytes and the others have 0.
        copies: the copies between device and host (``ao::offload``, ``ao::reload``), in order.
        stored: the memory saved for backward.
    """

    events: tuple[Event, ...]
    entry: int
    between: int
    end: int
    gradients: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    log: tuple[tuple[int, int, int], ...] = ()
    copies: tuple[Copy, ...] = ()
    stored: tuple[Stored, ...] = ()

    def hole(self, first: int, last: int) -> int:
        """Return the bytes that the caching allocator's pool holds beyond the peak of live bytes between two calls.

        A tensor gets the smallest free piece that is large enough, or new memory. Adjacent free pieces are merged. A
        piece that is too small for all later tensors stays unused, such as the piece of deleted bf16 logits.
        A tensor allocated earlier counts only if it is freed between the two calls.
        """
        pool = Pool()
        calls = [(key, nbytes) for call, key, nbytes in self.log if first <= call <= last]
        new = {key for key, nbytes in calls if nbytes > 0}
        before = {key: -nbytes for key, nbytes in calls if nbytes < 0 and key not in new}
        for key, nbytes in (*before.items(), *calls):
            if nbytes > 0:
                pool.allocate(key, nbytes)
            elif nbytes < 0:
                pool.free(key)
        return pool.held - pool.most

    @property
    def peak(self) -> int:
        """The largest number of bytes alive at once."""
        return max((event.live for event in self.events), default=self.entry)

    @property
    def at_peak(self) -> Event | None:
        """The first call at the peak; None if there are no calls."""
        return max(self.events, key=lambda event: event.live, default=None)


class Pool:
    """The caching allocator's pool for one stream, with expandable segments. It allocates by best fit."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int | None]] = []  # bytes, and the storage that uses the piece or None
        self.live = self.most = 0

    @property
    def held(self) -> int:
        """The total bytes of all pieces."""
        return sum(nbytes for nbytes, _ in self.pieces)

    def allocate(self, key: int, nbytes: int) -> None:
        """Take the smallest free piece that is large enough, or extend the pool."""
        free = [(size, i) for i, (size, user) in enumerate(self.pieces) if user is None and size >= nbytes]
        if not free and self.pieces and self.pieces[-1][1] is None:
            self.pieces.pop()
        size, i = min(free, default=(nbytes, len(self.pieces)))
        remainder = [(size - nbytes, None)] if size > nbytes else []
        self.pieces[i : i + 1] = [(nbytes, key), *remainder]
        self.live += nbytes
        self.most = max(self.most, self.live)

    def free(self, key: int) -> None:
        """Free a storage's piece, and merge it with adjacent free pieces."""
        i = next(i for i, (_, user) in enumerate(self.pieces) if user == key)
        self.live -= self.pieces[i][0]
        first = i - (i > 0 and self.pieces[i - 1][1] is None)
        end = i + 1 + (self.pieces[i + 1 : i + 2] != [] and self.pieces[i + 1][1] is None)
        self.pieces[first:end] = [(sum(nbytes for nbytes, _ in self.pieces[first:end]), None)]


class Part(Protocol):
    """A part of a step that runs on meta tensors: a compiled program, or an ``eager.EagerGraph``."""

    @property
    def inputs(self) -> tuple[GraphInput, ...]:
        """The arguments."""

    def run_forward(self, memory: Memory, inputs: list[Any]) -> tuple[list[Any], Any]:
        """Run forward. Return the results and the state for backward. Empties ``inputs``."""

    def run_backward(self, memory: Memory, state: Any, tangents: dict[int, Any]) -> list[Any]:
        """Run backward, and return the inputs' gradients. Empties ``state`` and ``tangents``.

        ``tangents`` maps each result that a later part reads to its gradient: None if that part returned none.
        """


@dataclass(frozen=True)
class PaperCompilation:
    """The result of `compile_on_paper`: the compiled graphs, and the tensors they exchange.

    Attributes:
        gpu: the described GPU.
        forward: the forward graph of a training step; None in inference.
        backward: the backward graph of a training step; None in inference.
        inference: the graph if nothing requires a gradient; None in training.
        saved: tensors that forward saves for backward.
        handed: for each input of backward, the number of the forward output it receives; None for a result's gradient.
        tangents: the numbers of forward's results whose gradients are inputs of backward, in backward's order.
    """

    gpu: GPU
    forward: GeneratedGraph | None
    backward: GeneratedGraph | None
    inference: GeneratedGraph | None
    saved: tuple[SavedTensor, ...]
    handed: tuple[int | None, ...] = field(default=(), repr=False)
    tangents: tuple[int, ...] = field(default=(), repr=False)

    @property
    def graphs(self) -> dict[str, GeneratedGraph]:
        """The graphs that are not None, by name."""
        named = {"forward": self.forward, "backward": self.backward, "inference": self.inference}
        return {name: graph for name, graph in named.items() if graph is not None}

    @property
    def inputs(self) -> tuple[GraphInput, ...]:
        """The arguments."""
        return next(iter(self.graphs.values())).inputs

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written by all graphs together."""
        return sum(graph.bytes_moved for graph in self.graphs.values())

    @property
    def kernels(self) -> tuple[GeneratedKernel, ...]:
        """The Triton kernels of all graphs."""
        return tuple(kernel for graph in self.graphs.values() for kernel in graph.kernels)

    def saved_bytes(self, *, include_inputs: bool = True, include_parameters: bool = False) -> int:
        """Return the bytes saved for backward.

        Parameters, buffers and their views are excluded, because they stay alive whether saved or not. Inputs are
        included: in a model, a block's input is another block's output, which is alive only because it was saved.

        Args:
            include_inputs: count the function's inputs that are neither parameters nor buffers.
            include_parameters: count parameters and buffers.

        Returns:
            The sum of `SavedTensor.nbytes`.
        """
        return sum(
            tensor.nbytes
            for tensor in self.saved
            if (include_parameters or not tensor.is_parameter) and (include_inputs or not tensor.is_graph_input)
        )

    def run_forward(self, memory: Memory, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """Run forward on meta tensors (``Part``)."""
        kind, graph = next(iter(self.graphs.items()))
        outputs = _call(memory, graph, kind, inputs)
        memory.save(self.saved, outputs[graph.results :])
        return outputs[: graph.results], [None if number is None else outputs[number] for number in self.handed]

    def run_backward(self, memory: Memory, state: list[Any], tangents: dict[int, Any]) -> list[Any]:
        """Run backward on meta tensors (``Part``). Results without a gradient get zeros."""
        if self.backward is None:
            return []
        positions = iter(self.tangents)
        for j, (spec, number) in enumerate(zip(self.backward.inputs, self.handed, strict=True)):
            if number is None:
                tangent = tangents.pop(next(positions, -1), None)
                state[j] = memory.new(spec, counted=True) if tangent is None else tangent
                del tangent
        return _call(memory, self.backward, "backward", state)

    def timeline(self) -> Timeline:
        """Compute the live-bytes timeline of forward and backward by running the generated wrapper on meta tensors.

        Counts the function's arguments and results, the graphs' allocations on the device, and gradients, but not
        parameters and buffers. The caller holds arguments and results to the end.

        Raises:
            ValueError: a graph calls an operator that does not run without data.
        """
        return timeline_of([self], {})

    def peak_bytes(self) -> int:
        """Return the peak of live bytes during forward and backward, without parameters (`timeline`)."""
        return self.timeline().peak

    def __str__(self) -> str:
        rows = [("", "bytes moved", "launches")]
        for name, graph in self.graphs.items():
            rows.append((name, _mib(graph.bytes_moved), str(sum(kernel.launches for kernel in graph.kernels))))
            rows += [(f"  {kernel.name}", _mib(kernel.bytes_moved), str(kernel.launches)) for kernel in graph.kernels]
            rows += [(f"  {call}", "", str(count)) for call, count in Counter(graph.extern).items()]
        if self.saved:
            rows.append(("saved for backward", _mib(self.saved_bytes()), ""))
            for tensor in self.saved:
                kind = "parameter" if tensor.is_parameter else "input" if tensor.is_graph_input else "intermediate"
                dtype = str(tensor.dtype).removeprefix("torch.")
                rows.append((f"  {tensor.name} {dtype}{list(tensor.shape)}", _mib(tensor.nbytes), kind))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows]
        return "\n".join([f"compiled for {self.gpu.name} ({self.gpu.arch}), without a device", *lines])


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def timeline_of(
    parts: Sequence[Part],
    links: Mapping[tuple[int, int], tuple[int, int]] | None = None,
    *,
    device: str = "cuda",
    launched: Callable[[str, str, Sequence[Any]], None] | None = None,
    units: Sequence[str | None] = (),
    shared: Mapping[tuple[int, int], str] | None = None,
    retained: Collection[tuple[int, int]] = (),
) -> Timeline:
    """Compute the timeline of a step with several graphs. Their backwards run in reverse order.

    Args:
        parts: the step's graphs in forward order.
        links: maps (graph, input) to the (earlier graph, result) that is the same tensor. All four are indices.
            Gradients flow back along the links.
        device: the type of the device whose memory is counted.
        launched: called for each launch of a generated kernel with the graph, the kernel's name and its arguments.
        units: for each graph, the layer to record for its calls. With None or no ``units``, calls keep their modules.
        shared: maps (graph, input) to a name. Inputs with the same name are one tensor with one gradient.
        retained: each (graph, result) that the caller holds to the end although a later graph reads it.

    Raises:
        ValueError: a graph has an operator that does not run without data.
    """
    links, shared, memory = links or {}, shared or {}, Memory(device, launched)
    last_reader = {result: max(i for (i, _), read in links.items() if read == result) for result in links.values()}
    callers: list[Any] = []  # tensors that the caller holds: results that no later graph reads, and gradients
    results: dict[tuple[int, int], Any] = {}  # results that later graphs read
    saved: list[Any] = []
    arguments: dict[object, Any] = {}  # by name, or by (graph, input)
    modules = [unit if unit is None else (unit,) for unit in units or [None] * len(parts)]
    with memory:
        for i, part in enumerate(parts):
            for j, spec in enumerate(part.inputs):
                name = shared.get((i, j), (i, j))
                if (i, j) not in links and name not in arguments:
                    arguments[name] = memory.new(spec, counted=not spec.is_parameter)
        entry = memory.live
        for i, part in enumerate(parts):
            memory.part, memory.modules = i, modules[i]
            places = [(i, j) for j in range(len(part.inputs))]
            inputs = [results[links[p]] if p in links else arguments[shared.get(p, p)] for p in places]
            outputs, state = part.run_forward(memory, inputs)
            saved.append(state)
            for j, output in enumerate(outputs):
                if (i, j) in last_reader:
                    results[i, j] = output
                if (i, j) not in last_reader or (i, j) in retained:
                    callers.append(output)
            outputs, state = [], None
            output = None
            for result in [result for result in results if last_reader[result] <= i]:
                del results[result]
        between = memory.live
        tangents: dict[tuple[int, int], Any] = {}
        born: dict[tuple[int, int], tuple[int, int]] = {}
        known: set[object] = set()  # inputs that already have a gradient
        for i, part in reversed(list(enumerate(parts))):
            memory.part, memory.modules = i, modules[i]
            memory.starts[i] = memory.now
            linked = [j for k, j in last_reader if k == i]
            gradients = part.run_backward(memory, saved.pop(), {j: tangents.pop((i, j), None) for j in linked})
            for j, birth in memory.born(gradients).items():
                name = shared.get((i, j), (i, j))
                if name in known:  # it is added to the existing gradient
                    gradients[j] = None
                elif part.inputs[j].is_parameter:
                    born[i, j] = birth
                known.add(name)
            for j, gradient in enumerate(gradients):
                if (i, j) not in links:
                    callers.append(gradient)
                elif links[i, j] not in tangents:  # otherwise it is added to the existing gradient
                    tangents[links[i, j]] = gradient
            gradients, gradient = [], None
        end = memory.live
    events = memory.finished()
    copies = tuple(Copy(*copy) for copy in memory.copies.values())
    return Timeline(events, entry, between, end, born, tuple(memory.log), copies, tuple(memory.stored(events)))


def _call(memory: Memory, graph: GeneratedGraph, kind: str, inputs: list[Any]) -> list[Any]:
    """Call a generated graph, which frees its inputs."""
    memory.begin(kind, graph.scheduled)
    boxed = list(inputs)
    inputs.clear()
    call = _call_of(graph.marked_code, memory)
    try:
        return list(call(boxed))
    except RuntimeError as error:  # no kernel for meta tensors, or a value is read
        raise ValueError(f"the {kind} graph cannot run without data: {str(error).splitlines()[0]}") from error
    finally:
        memory.finish()


class Storages(TorchDispatchMode):
    """Mode that counts the storages of meta tensors that operators allocate, until the storages are freed.

    Attributes:
        live: bytes alive now.
        most: the largest number of bytes alive at once.
        log: (``now``, storage's number, bytes) for each storage; negative bytes if it is freed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.most = 0
        self.numbers: dict[int, int] = {}  # live storage -> its number: its first place in ``log``
        self.log: list[tuple[int, int, int]] = []

    @property
    def now(self) -> int:
        """The number of calls so far."""
        return 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device.type == "meta":
                self.add(value)
        return result

    def add(self, tensor: Tensor, counted: bool = True) -> Tensor:
        """Count a tensor's storage from now on, unless it is known. With ``counted=False``, its bytes count as 0."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.numbers:
            nbytes = storage.nbytes() if counted else 0
            self.live += nbytes
            number = self.numbers[key] = len(self.log)  # a new storage may get a freed storage's identity
            self.log.append((self.now, number, nbytes))
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self._freed, key, nbytes)
        return tensor

    def _freed(self, key: int, nbytes: int) -> None:
        self.log.append((self.now, self.numbers.pop(key), -nbytes))
        self.live -= nbytes

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; -1 if the storage is unknown."""
        return self.numbers.get(tensor.untyped_storage()._cdata, -1)


class Memory(Storages):
    """Mode that counts live storages, runs operators on meta tensors, and records a step's calls."""

    def __init__(self, device: str, launched: Callable[[str, str, Sequence[Any]], None] | None = None) -> None:
        super().__init__()
        self.device, self.launched = device, launched
        self.events: list[Event] = []
        # These dictionaries' keys are storages' numbers, except for ``starts``.
        self.reused: dict[int, int] = {}  # storage that will be reused -> the last call that used it
        self.waited: list[tuple[int, int, int]] = []  # (first call, last call, bytes) of memory that waited for reuse
        self.uses: dict[int, list[int]] = {}  # the calls that use a storage
        self.written: dict[int, int] = {}  # the last call of forward that writes a storage
        self.copies: dict[int, list[int]] = {}  # a copy's storage -> fields of its ``Copy``
        self.saved: dict[int, tuple[SavedTensor, int, int]] = {}  # tensor, graph, end of forward
        self.starts: dict[int, int] = {}  # graph -> the first call of its backward
        self.part = 0  # the graph that runs
        self.kind = ""
        self.scheduled: Sequence[Launch] = ()
        self.launch: Launch | None = None
        self.modules: tuple[str, ...] | None = None  # the modules of all calls; None: each call's modules
        self.call, self.flop = "", 0.0

    def new(self, spec: Any, counted: bool) -> Any:
        if spec.number is not None:
            return spec.number
        return self.empty_strided(spec.shape, spec.stride, spec.dtype, self.device if counted else "meta")

    def empty_strided(self, size: Any, stride: Any, dtype: torch.dtype, device: Any) -> Tensor:
        """Allocate a tensor, which counts if it is on the device."""
        with _disable_current_modes():  # this is not a call of the program
            tensor = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return self.add(tensor, counted=torch.device(device).type == self.device)

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._with_random_state(func.name(), list(args), dict(kwargs or {}))
        self.touch(tree_leaves((args, kwargs)))
        if func.namespace == "ao":
            return self._copy(func._opname, args[0])
        meta = torch.device("meta")

        def on_meta(value: Any) -> Any:
            return meta if isinstance(value, torch.device) else value

        args, kwargs = tree_map(on_meta, (args, kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.touch(tree_leaves(result))
        if not is_view(func):
            self.ran(func, args, kwargs, result)
        return result

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """Record a copy between the device and the host, or the call that waits for it."""
        self.note(f"ao.{name}")
        if name == "wait_tensor":
            self.copies[self.number_of(tensor)][2] = self.now
            return tensor
        with _disable_current_modes():  # on meta, the operator would allocate host memory
            result = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self.add(result, counted=name == "reload")
        self.copies[self.number_of(result)] = [result.nbytes, self.now, self.now]
        return result

    def save(self, described: Sequence[SavedTensor], values: Sequence[Any]) -> None:
        """Record the tensors that the running graph saves for its backward."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        # The lengths differ if copies on the host are saved.
        pairs = zip(described, tensors, strict=True) if len(described) == len(tensors) else ()
        for saved, tensor in pairs:
            number = self.number_of(tensor)
            if number >= 0 and not saved.is_parameter and not saved.is_graph_input:
                for unit in filter(None, self.modules or ()):  # equal layers share a compilation and its paths
                    inner = saved.module.split(".")[unit.count(".") + 1 :]
                    saved = replace(saved, module=".".join((unit, *inner)))
                self.saved.setdefault(number, (saved, self.part, self.now))

    def stored(self, events: Sequence[Event]) -> Iterator[Stored]:
        """Yield the memory that is saved for backward, and that backward reads and frees."""
        freed = {number for _, number, nbytes in self.log if nbytes < 0}
        for number, (saved, graph, ends) in self.saved.items():
            uses, starts = self.uses.get(number, []), self.starts.get(graph, len(events))
            before, after = [i for i in uses if i < ends], [i for i in uses if i >= starts]
            if number in freed and before and after:
                written = self.written.get(number, before[0])  # before, the memory held another tensor
                ready = next((i for i in before if i > written and events[i].flop), before[-1] + 1)
                yield Stored(self.log[number][2], saved, ready, ends, starts, after[0])

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operator's call, and count the bytes that a library allocates during it."""
        self.note(str(func).removesuffix(".default"), flop_of_bf16(func.overloadpacket, args, kwargs, result))
        extra = _WORKSPACE.get(func.overloadpacket)
        if extra is not None:
            self.most = max(self.most, self.live + extra(args))

    def _with_random_state(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the operator inside a checkpoint's wrapper, which saves or restores a random state."""
        position = next((i for i, arg in enumerate(args) if isinstance(arg, torch._ops.OpOverload)), None)
        if position is None or "rng_state" not in name:
            raise NotImplementedError(f"{name} has no kernel for meta tensors")
        kwargs.pop("rng_state", None)
        result = self.__torch_dispatch__(args[position], (), tuple(args[position + 1 :]), kwargs)
        return (torch.empty(0, dtype=torch.uint8), result) if name == "run_and_save_rng_state" else result

    # -- calls

    @property
    def now(self) -> int:
        return len(self.events)

    def begin(self, kind: str, scheduled: Sequence[Launch]) -> None:
        self.finish()
        self.kind, self.scheduled, self.most = kind, scheduled, self.live

    def enter(self, index: int) -> None:
        """Begin a scheduler node's code. Tensors that only earlier nodes read have been freed."""
        self.finish()
        self.launch = self.scheduled[index]

    def note(self, call: str, flop: float = 0.0) -> None:
        """Record a call. The first call after `enter` names the event."""
        self.call, self.flop = self.call or call, self.flop + flop

    def touch(self, tensors: Sequence[Any], reads: bool = True) -> None:
        """Record that the current call reads these tensors, or, if not ``reads``, overwrites them completely."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                number = self.number_of(tensor)
                since = self.reused.pop(number, None)
                if since is not None and not reads:
                    self.waited.append((since, self.now, tensor.untyped_storage().nbytes()))
                uses = self.uses.setdefault(number, [])
                if uses[-1:] != [self.now]:
                    uses.append(self.now)
                if not reads and self.kind == "forward":
                    self.written[number] = self.now

    def reuse(self, tensor: Tensor) -> None:
        """Record that a result will reuse a tensor's memory. Only the next call may still read the tensor."""
        number = self.number_of(tensor)
        self.reused[number] = self.uses.get(number, [self.now])[-1]

    def finished(self) -> tuple[Event, ...]:
        """Return all calls, with the bytes that wait for reuse after each."""
        change = [0] * (len(self.events) + 1)
        for since, until, nbytes in self.waited:
            change[since] += nbytes
            change[until] -= nbytes
        waiting = itertools.accumulate(change)
        return tuple(replace(event, waiting=nbytes) for event, nbytes in zip(self.events, waiting, strict=False))

    def born(self, gradients: Sequence[Any]) -> dict[int, tuple[int, int]]:
        """Map each gradient's index to (call that allocated its storage, bytes). Shared storages count once."""
        births: dict[int, tuple[int, int]] = {}
        counted: set[int] = set()
        for j, gradient in enumerate(gradients):
            if isinstance(gradient, Tensor):
                number = self.number_of(gradient)
                births[j] = self.log[number][0], 0 if number in counted else gradient.untyped_storage().nbytes()
                counted.add(number)
        return births

    def finish(self) -> None:
        if self.call:
            nbytes, modules = (self.launch.bytes_moved, self.launch.modules) if self.launch else (0, ())
            nbytes *= not self.call.startswith("ao.")  # a copy does not occupy the compute stream
            modules = modules if self.modules is None else self.modules
            self.events.append(Event(self.kind, self.call, self.most, self.live, 0, nbytes, self.flop, modules))
            self.most = self.live
        self.call, self.flop, self.launch = "", 0.0, None


# Bytes that a library allocates during a call, according to its source. Flash attention 2's backward (mha_bwd in
# flash_api.cpp) sums dq in float32, in the query's shape with rows rounded up to 128 and width to 32.
_WORKSPACE: dict[Any, Callable[[Any], int]] = {
    aten._scaled_dot_product_flash_attention_backward: lambda args: (
        math.prod(args[1].shape[:2]) * -(-args[1].shape[2] // 128) * 128 * -(-args[1].shape[3] // 32) * 32 * 4
    )
}


# ---- stand-ins for kernels and libraries -----------------------------------------------------------------------------


class _Kernel:
    """Stand-in for a generated kernel; touches its arguments and computes nothing."""

    def __init__(self, name: str, memory: Memory, source: str) -> None:
        self.name, self.memory = name, memory
        match = re.search(rf"def {name}\(([^)]*)\)", source)
        self.parameters = [item.partition(":")[0].strip() for item in match[1].split(",")] if match else []

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.memory.note(self.name)
        if self.memory.launched is not None:
            self.memory.launched(self.memory.kind, self.name, args)
        named = list(zip(itertools.chain(self.parameters, itertools.repeat("")), args))  # noqa: B905
        self.memory.touch([arg for name, arg in named if not name.startswith("out_ptr")])
        self.memory.touch([arg for name, arg in named if name.startswith(("out_ptr", "in_out_ptr"))], reads=False)

    __call__ = run


class _Extern:
    """Stand-in for `extern_kernels`. A library call returns its `out`, or runs on meta if it has none."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
            self.memory.touch(tree_leaves((args, kwargs)))
            if out is not None:
                self.memory.touch([out], reads=False)
                self.memory.note(name, flop_of_bf16(getattr(aten, name, None), args, kwargs, out))
                return out
            from torch._inductor.select_algorithm import extern_kernels

            self.memory.note(name)
            return getattr(extern_kernels, name)(*args, **kwargs)

        return call


def _call_of(code: str, memory: Memory) -> Callable[[list[Any]], Sequence[Any]]:
    """Return the function `call` of a generated module, with kernels that do nothing."""
    stand_ins = {
        "empty_strided_cuda": functools.partial(memory.empty_strided, device="cuda"),
        "empty_strided_cpu": functools.partial(memory.empty_strided, device="cpu"),
        "empty_strided_cpu_pinned": functools.partial(memory.empty_strided, device="cpu"),
        "empty_strided": memory.empty_strided,
        "extern_kernels": _Extern(memory),
        "_enter": memory.enter,
        "_reuse": memory.reuse,
    }
    return called(code, stand_ins, lambda name, source: _Kernel(name, memory, source))
