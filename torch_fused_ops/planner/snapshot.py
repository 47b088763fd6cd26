"""Write a planned step in the format of PyTorch's memory snapshots, for PyTorch's viewer and ``explain --snapshot``."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch_fused_ops.virtual_gpu.timeline import Timeline

if TYPE_CHECKING:
    from torch_fused_ops.planner.static_memory import Resident


class _Recorder:
    """Collects events of allocations. Addresses are never used twice, so that each block is its own segment."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.alive: dict[object, dict[str, Any]] = {}
        self.live = 0
        self.next_address = 1 << 40

    def allocate(self, key: object, nbytes: int, category: str, *places: tuple[str, str]) -> None:
        """Record a block. ``places`` are (graph, module or kernel), the innermost first."""
        frames = [{"filename": file, "line": 0, "name": name} for file, name in places]
        event = {"action": "alloc", "addr": self.next_address, "size": nbytes, "stream": 0, "frames": frames}
        self.events.append({**event, "category": category, "time_us": len(self.events)})
        self.alive[key] = self.events[-1]
        self.live += nbytes
        self.next_address += nbytes + 512

    def free(self, key: object) -> None:
        """Record the release of a block."""
        block = self.alive.pop(key)
        self.live -= block["size"]
        for action in ("free_requested", "free_completed"):
            self.events.append({**block, "action": action, "time_us": len(self.events)})

    def reach(self, nbytes: int, category: str, *places: tuple[str, str]) -> None:
        """Record a temporary block if fewer than ``nbytes`` are alive."""
        if self.live < nbytes:
            self.allocate("temporary", nbytes - self.live, category, *places)
            self.free("temporary")

    def data(self) -> dict[str, Any]:
        """Return the snapshot."""
        segments = []
        for event in self.alive.values():
            nbytes, address = event["size"], event["addr"]
            block = {"address": address, "size": nbytes, "requested_size": nbytes, "state": "active_allocated"}
            blocks = [{**block, "frames": event["frames"], "category": event["category"]}]
            sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), nbytes)
            segment = {"device": 0, "address": address, "stream": 0, "segment_type": "large", **sizes, "blocks": blocks}
            segments.append({**segment, "segment_pool_id": (0, 0), "is_expandable": False})
        return {"segments": segments, "device_traces": [self.events]}


def snapshot_of(timeline: Timeline, unread: int, resident: Resident) -> dict[str, Any]:
    """Return a step's allocations as ``torch.cuda.memory._snapshot`` returns them. Frames name modules and kernels.

    Args:
        timeline: the timeline of forward and backward on one GPU, without FSDP2.
        unread: bytes of arguments that no graph reads.
        resident: parameters, optimizer state, and the optimizer's temporary tensors.
    """
    recorder = _Recorder()
    for path, nbytes in resident.sizes:
        recorder.allocate(path, nbytes, "parameter", ("parameters", path))
    if resident.state:
        recorder.allocate("state", resident.state, "optimizer_state", ("optimizer", "state"))
    if unread:
        recorder.allocate("unread", unread, "input", ("arguments", "not read"))
    base = recorder.live
    kinds = dict(_kinds(timeline))
    calls = itertools.groupby(timeline.log, key=lambda entry: entry[0])
    logged: Mapping[int, list[tuple[int, int, int]]] = {call: list(entries) for call, entries in calls}
    for call in range(len(timeline.events) + 1):
        event = timeline.events[call] if call < len(timeline.events) else None
        graph = event.graph if event else "after backward"
        places = ((graph, module) for module in event.modules[:1]) if event else ()
        stack = (*places, (graph, event.call if event else "end"))
        most = recorder.live
        for _, key, nbytes in logged.get(call, ()):
            if nbytes > 0:
                recorder.allocate(key, nbytes, kinds[key], *stack)
            elif key in recorder.alive:
                recorder.free(key)
            most = max(most, recorder.live)
        if event and most - base < event.live:  # a library's workspace
            recorder.reach(base + event.live, "temporary", *stack)
    recorder.reach(resident.optimizer_peak, "temporary", ("optimizer", "temporary tensors"))
    return recorder.data()


def _kinds(timeline: Timeline) -> Iterator[tuple[int, str]]:
    """Yield each storage with the category that PyTorch's profiler would give it."""
    first = sum(event.graph != "backward" for event in timeline.events)  # the first call of backward
    freed = {key: call for call, key, nbytes in timeline.log if nbytes < 0}
    gradients = Counter(timeline.gradients.values())
    inputs = timeline.entry
    for call, key, nbytes in timeline.log:
        if nbytes <= 0:
            continue
        if inputs > 0:
            inputs, kind = inputs - nbytes, "input"
        elif gradients[call, nbytes]:
            gradients[call, nbytes] -= 1
            kind = "gradient"
        else:
            kind = "activation" if call < first <= freed.get(key, len(timeline.events)) else "temporary"
        yield key, kind
