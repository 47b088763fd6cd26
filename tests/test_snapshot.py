"""Memory snapshots: reading PyTorch's files, kinds of memory, and advice."""

import json
import os
import pickle
import re
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.cuda import _memory_viz

from torch_fused_ops.reports import snapshot
from torch_fused_ops.reports.saved import Saved, SavedRow
from torch_fused_ops.reports.snapshot import read_snapshot

MIB = 1 << 20


def frames(*places: str) -> list[dict[str, Any]]:
    """Return a stack trace, innermost frame first, of "file:function"."""
    return [{"filename": p.rpartition(":")[0], "line": 7, "name": p.rpartition(":")[2]} for p in places]


MODULE = "/site-packages/torch/nn/modules/module.py"
FORWARD = frames("/site-packages/torch/nn/functional.py:linear", "/home/me/model.py:forward", f"{MODULE}:_call_impl")
LOSS = frames("/site-packages/torch/nn/functional.py:cross_entropy", "/home/me/train.py:step")
LOADING = frames(f"{MODULE}:_apply", "/home/me/train.py:main")
STATE = frames("/site-packages/torch/optim/adamw.py:_init_group", "/site-packages/torch/optim/optimizer.py:wrapper")
STEP = frames(
    "/site-packages/torch/optim/adamw.py:_multi_tensor_adamw", "/site-packages/torch/optim/optimizer.py:wrapper"
)
RECOMPUTED = frames("/home/me/model.py:forward", "/site-packages/torch/utils/checkpoint.py:unpack_hook")
BACKWARD: list[dict[str, Any]] = []  # the autograd engine's thread


class Recording:
    """A snapshot with one segment, written event by event."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.alive: dict[int, tuple[int, Any]] = {}
        self.end = 1 << 30

    def alloc(self, nbytes: int, where: Any, traced: bool = True) -> int:
        address, self.end = self.end, self.end + nbytes
        if traced:
            event = {"action": "alloc", "addr": address, "size": nbytes, "stream": 0, "frames": where, "time_us": 0}
            self.events.append(event)
        self.alive[address] = nbytes, where
        return address

    def free(self, address: int) -> None:
        nbytes, _ = self.alive.pop(address)
        event = {"addr": address, "size": nbytes, "stream": 0, "frames": []}
        self.events += [{"action": action, **event} for action in ("free_requested", "free_completed")]

    def oom(self, nbytes: int) -> None:
        self.events.append({"action": "oom", "size": nbytes, "device_free": MIB, "stream": 0, "frames": []})

    def data(self, **segment: Any) -> dict[str, Any]:
        blocks, position = [], 1 << 30
        for address in [*self.alive, self.end]:
            if address > position:
                blocks.append({"address": position, "size": address - position, "state": "inactive", "frames": []})
                blocks[-1]["requested_size"] = 0
            if address < self.end:
                nbytes, where = self.alive[address]
                block = {"address": address, "size": nbytes, "requested_size": nbytes, "frames": where}
                blocks.append({**block, "state": "active_allocated"})
                position = address + nbytes
        total, used = self.end - (1 << 30), sum(nbytes for nbytes, _ in self.alive.values())
        common = {"address": 1 << 30, "total_size": total, "stream": 0, "segment_type": "large", "blocks": blocks}
        sizes = {"allocated_size": used, "active_size": used, "device": 0, "segment_pool_id": (0, 0)}
        return {"segments": [{**common, **sizes, **segment}], "device_traces": [self.events]}

    def read(self, folder: Path, *, segment: Any = None, **arguments: Any) -> snapshot.SnapshotReport:
        return read_snapshot(write(folder, self.data(**segment or {})), **arguments)


def write(folder: Path, data: Any) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))
    return path


def failed_step(recording: Recording) -> None:
    """Record two parameters, a whole step, and a step that fails in backward."""
    for _ in range(2):
        recording.alloc(4 * MIB, LOADING)
    for is_last in (False, True):
        activations = [recording.alloc(24 * MIB, FORWARD) for _ in range(3)]
        recording.free(recording.alloc(8 * MIB, FORWARD))
        logits = recording.alloc(32 * MIB, FORWARD), recording.alloc(64 * MIB, LOSS)
        temporary = recording.alloc(16 * MIB, BACKWARD)
        gradients = [recording.alloc(4 * MIB, BACKWARD)]
        recording.free(temporary)
        recording.free(activations.pop())
        if is_last:
            recording.alloc(2 * MIB, RECOMPUTED)
            recording.alloc(24 * MIB, BACKWARD)
            recording.oom(100 * MIB)
            return
        gradients.append(recording.alloc(4 * MIB, BACKWARD))
        for address in (*logits, *activations):
            recording.free(address)
        for _ in range(4):
            recording.alloc(4 * MIB, STATE)
        recording.free(recording.alloc(6 * MIB, STEP))
        for address in gradients:
            recording.free(address)


def test_kinds_at_a_failure(tmp_path: Path) -> None:
    recording = Recording()
    failed_step(recording)
    report = recording.read(tmp_path)
    mib = {kind: nbytes // MIB for kind, nbytes in report.kinds().items()}
    assert mib == {
        "logits and their copies": 96, "saved activations": 48, "temporaries": 24, "optimizer state": 16,
        "parameters": 8, "gradients": 4, "recomputed by a checkpoint": 2,
    }  # fmt: skip
    assert report.requested == 100 * MIB and report.live == 198 * MIB
    assert [(g.where, g.count) for g in report.groups[:2]] == [("me/train.py:7 step", 1), ("me/model.py:7 forward", 2)]


def test_temporaries_of_an_optimizer_step_that_fails(tmp_path: Path) -> None:
    recording = Recording()
    recording.alloc(4 * MIB, STATE)
    recording.alloc(6 * MIB, STEP)
    recording.oom(MIB)
    assert recording.read(tmp_path).kinds() == {"temporaries": 6 * MIB, "optimizer state": 4 * MIB}


def test_a_forward_tensor_that_backward_never_sees_is_temporary(tmp_path: Path) -> None:
    recording = Recording()
    recording.free(recording.alloc(8 * MIB, FORWARD))
    recording.alloc(2 * MIB, BACKWARD)
    assert recording.read(tmp_path).kinds() == {"temporaries": 8 * MIB}


def test_equal_sizes_are_gradients_at_most_once(tmp_path: Path) -> None:
    recording = Recording()
    for _ in range(3):
        recording.alloc(4 * MIB, BACKWARD)
    kinds = recording.read(tmp_path, parameters=[4 * MIB, 4 * MIB]).kinds()
    assert kinds == {"gradients": 8 * MIB, "temporaries": 4 * MIB}


def test_gradients_of_an_earlier_backward(tmp_path: Path) -> None:
    recording = Recording()
    for where in (LOADING, BACKWARD, FORWARD):
        recording.alloc(4 * MIB, where)
    recording.oom(MIB)
    report = recording.read(tmp_path)
    assert report.kinds()["gradients of an earlier backward"] == 4 * MIB
    assert any("zero_grad(set_to_none=True) before forward frees 4.00 MiB" in line for line in report.advice)


def test_memory_from_before_the_recording(tmp_path: Path) -> None:
    recording = Recording()
    early = [recording.alloc(4 * MIB, [], traced=False) for _ in range(3)]
    recording.alloc(32 * MIB, FORWARD)
    recording.free(early[0])
    report = recording.read(tmp_path)
    assert report.kinds() == {"saved activations": 32 * MIB, "allocated before the recording": 12 * MIB}
    assert any("before the recording" in note for note in report.advice)
    kinds = recording.read(tmp_path, parameters=[4 * MIB]).kinds()
    assert kinds["parameters"] == 4 * MIB and kinds["allocated before the recording"] == 8 * MIB


def test_saved_tensors_of_the_model_name_modules_and_settings(tmp_path: Path) -> None:
    recording = Recording()
    for nbytes in (32, 32, 16):
        recording.alloc(nbytes * MIB, FORWARD)
    row = SavedRow("layers.0…1.up", (4096, 4096), "bfloat16", 64 * MIB, (), ('memory="input"',), count=2)
    saved = Saved((row,), {'memory="input"': 0})
    report = recording.read(tmp_path, saved=saved)
    places = {group.where.partition(" ")[0]: group.nbytes // MIB for group in report.groups}
    assert places == {"layers.0…1.up": 64, "me/model.py:7": 16}
    assert 'memory="input": 64.0 MiB less saved for backward.' in report.advice


@pytest.mark.parametrize(
    "largest, free, expandable, expected",
    [
        (60, 120, False, "the request fits"),
        (60, 90, False, "would not be enough"),
        (60, 120, True, "on already"),
    ],
)
def test_expandable_segments_are_advised_if_they_would_help(
    tmp_path: Path, largest: int, free: int, expandable: bool, expected: str
) -> None:
    recording = Recording()
    for nbytes in (largest, free - largest):
        hole = recording.alloc(nbytes * MIB, FORWARD)
        recording.alloc(MIB, FORWARD)
        recording.free(hole)
    recording.oom(100 * MIB)
    report = recording.read(tmp_path, segment={"is_expandable": expandable})
    assert (report.unused, report.largest) == (free * MIB, largest * MIB)
    assert any(expected in line for line in report.advice)


def test_missing_records_are_noted(tmp_path: Path) -> None:
    recording = Recording()
    recording.alloc(MIB, [], traced=False)
    assert any("no trace" in note for note in recording.read(tmp_path).advice)
    recording.alloc(MIB, [])
    assert any("no stack traces" in note for note in recording.read(tmp_path).advice)
    assert any("private pools" in note for note in recording.read(tmp_path, segment={"segment_pool_id": (0, 1)}).advice)


def test_the_device_with_the_failure_is_shown(tmp_path: Path) -> None:
    first, second = Recording(), Recording()
    first.alloc(64 * MIB, FORWARD)
    second.alloc(8 * MIB, FORWARD)
    second.oom(MIB)
    data, other = first.data(), second.data(device=1)
    data = {name: data[name] + other[name] for name in data}
    report = read_snapshot(write(tmp_path, data))
    assert "device 1: 8.00 MiB alive" in report.moment
    assert any("0: 64.0 MiB" in note for note in report.advice)


@pytest.mark.parametrize("version", ["2.11", "2.13", "2.15"])
def test_files_of_each_version(tmp_path: Path, version: str) -> None:
    """Torch 2.15 annotates allocations; older files have fewer fields."""
    recording = Recording()
    address = recording.alloc(32 * MIB, FORWARD)
    extra: dict[str, Any] = {"registration_counter": -1} if version != "2.11" else {}
    if version == "2.15":
        metadata = {"user_metadata": "{}", "compile_context": "N/A", "pool_id": (0, 0)}
        recording.events.append({"action": "annotate", "addr": address, "size": 0, "stream": 0, **metadata})
        recording.events[0].update(metadata)
    recording.events.append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": []})
    data = {
        **recording.data(**extra),
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
        "external_annotations": [],
    }
    if version == "2.11":
        for segment in data["segments"]:
            del segment["device"], segment["segment_pool_id"]
    assert read_snapshot(write(tmp_path, data)).kinds() == {"saved activations": 32 * MIB}


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


MEMO = b"\x80\x04Nr" + struct.pack("<I", 0xF0000000) + b"."
BAD = {
    "calls a function": pickle.dumps(_Evil()),
    "calls a function, protocol 0": b"cos\nmkdir\n(S'evil'\ntR.",
    "nested in a snapshot": pickle.dumps({"segments": [], "device_traces": [[_Evil()]]}),
    "a large memo": MEMO,
    "a large string": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "truncated": pickle.dumps(Recording().data())[:100],
    "empty": b"",
    "JSON": b'{"segments": []}',
    "another pickle": pickle.dumps([1, 2]),
    "segments without blocks": pickle.dumps({"segments": [{}], "device_traces": []}),
    "a file of torch.save": b"PK\x03\x04" + bytes(64),
    "nothing allocated": pickle.dumps({"segments": [], "device_traces": [[]]}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_rejected_and_run_nothing(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape("snapshot.pickle")):
        read_snapshot(write(tmp_path, BAD[name]))
    assert not (tmp_path / "evil").exists()


def test_files_are_read_on_other_systems_than_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot.sys, "platform", "darwin")
    monkeypatch.delattr(os, "sysconf")  # has no SC_AVPHYS_PAGES there
    recording = Recording()
    recording.alloc(MIB, FORWARD)
    assert recording.read(tmp_path).live == MIB


def test_a_missing_file() -> None:
    with pytest.raises(ValueError, match=r"missing\.pickle cannot be read: No such file"):
        read_snapshot("missing.pickle")


@given(st.lists(st.integers(0, 9), max_size=60), st.randoms())
@settings(max_examples=50, deadline=None)
def test_live_bytes_equal_a_naive_count(sizes: list[int], random: Any) -> None:
    """Compare with a replay of the trace after each event. A size of 0 frees a random block."""
    recording, counts = Recording(), [0]
    for size in sizes:
        if size:
            recording.alloc(size, FORWARD)
        elif recording.alive:
            recording.free(random.choice(list(recording.alive)))
            counts.append(counts[-1])  # requested, not yet completed
        else:
            continue
        counts.append(sum(nbytes for nbytes, _ in recording.alive.values()))
    data = recording.data()
    assert snapshot.Device(0, data["device_traces"][0], data["segments"]).live_bytes() == counts


def test_the_viewer_reads_recordings(tmp_path: Path) -> None:
    """``Recording`` writes PyTorch's format."""
    recording = Recording()
    failed_step(recording)
    data = recording.data()
    assert "total_allocated: 198.0MiB" in _memory_viz.segsum(data)
    assert "OutOfMemoryError # 100.0MiB requested" in _memory_viz.trace(data)
    assert Counter(re.findall("free completed", _memory_viz.trace(data)))["free completed"] == 13
    assert json.loads(recording.read(tmp_path).to_json())["live"] == 198 * MIB
