"""Run groups of checks in several processes that communicate through gloo on the CPU, since a start takes seconds.

A test file lists its checks, functions of (rank, ranks, folder), in groups; ``main`` runs a group in one process, and
``in_processes`` starts the processes of a group and waits for them.
"""

import datetime
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Check = Callable[[int, int, Path], None]


def in_processes(file: str, group: str, ranks: int, folder: Path, seconds: float = 240) -> None:
    """Run a test file's group of checks in several processes."""
    command = [sys.executable, "-W", "ignore", file, group, str(ranks), str(folder)]
    path = os.pathsep.join([*map(str, Path(file).parents[1:3]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n\n".join(outputs)
    print(outputs[0])


def main(groups: Mapping[str, Sequence[Check]]) -> None:
    """Run a group of checks in this process, which ``in_processes`` started."""
    import torch
    import torch.distributed as dist

    group, ranks, rank, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[4]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=100),
    )
    failed = False
    for check in groups[group]:
        start = time.perf_counter()
        try:
            check(rank, ranks, folder)
            dist.barrier()
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            failed = True
            break
        finally:
            print(f"{check.__name__}: {time.perf_counter() - start:.1f} s{', failed' if failed else ''}", flush=True)
    if not failed:
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(failed)  # without waiting for processes that wait for this process after a failed check
