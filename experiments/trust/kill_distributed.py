"""Kills one of several processes that train one run, and resumes with another number.

``python experiments/trust/kill_distributed.py --kills 20`` is the distributed part of
``kill_training.py``: small private runs, each trained by 2 or 4
processes, of which one, the first or another, is killed with SIGKILL at a random
moment. After every kill

* all other processes have ended within a minute, with an error that says why;
* charged steps are at least those that a witness saw released, and at most one more
  for each kill, and no step was released twice;
* only the first process has written anything.

The run is then resumed with another number of processes (1, 2 or 4). Every second run
has a seed, and must end with the bits of an undisturbed single process. ``--kind``
names another kind of run than the plain one; those with bands have no seed. ``--fault
charge-late`` plants a fault that must be noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import jax
import kill_training as alone
from provenance import provenance

from jaxdp_episodic.trainer.run import run_files

SIZES = (1, 2, 4)
KINDS = tuple(kind for kind in alone.KINDS if kind != "booked")
alone.STEPS = 45  # each waits for several processes
LIMIT_S, HEARTBEATS_S = 60.0, 10
# Errors of the other processes; the second is JAX's own, if it comes first.
ERRORS = ("RunEndedError: ", "JAX distributed service detected fatal errors")
SCRATCH = "scratch-"


@dataclass
class Summary:
    """All results; see the module."""

    kills: list[dict[str, object]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    runs_finished: int = 0
    seconds: float = 0.0


def process(
    folder: Path,
    port: int,
    number: int,
    index: int,
    resume: bool,
    is_seeded: bool,
    kind: str,
) -> None:
    """Starts one process of a run, in its own working folder."""
    if number > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            number,
            index,
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=HEARTBEATS_S,
        )
    run = alone.made_trainer(1 if is_seeded else None, kind)
    if resume:
        run.resume(folder)
    if index == 0:
        alone.train_before_a_witness(run, folder, os.environ.get("FAULT"))
    else:
        run.train(folder)


def started(
    folder: Path, number: int, resume: bool, is_seeded: bool, kind: str
) -> list[subprocess.Popen[str]]:
    """Starts the processes of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / alone.READY).unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = []
    for index in range(number):
        own = folder.parent / f"{SCRATCH}{index}"
        own.mkdir(exist_ok=True)
        told = [str(folder), port, number, index, int(resume), int(is_seeded)]
        command = [sys.executable, __file__, "--process", *map(str, told)]
        command += ["--kind", kind]
        made.append(
            subprocess.Popen(
                command,
                cwd=own,
                stdout=subprocess.DEVNULL,
                stderr=open(own / "stderr", "w"),
                text=True,
            )
        )
    return made


def waited(processes: list[subprocess.Popen[str]], seconds: float) -> list[int | None]:
    """Returns the exit codes; None for processes that have not ended in time."""
    end = time.monotonic() + seconds
    for one in processes:
        try:
            one.wait(max(end - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            pass
    codes = [one.returncode for one in processes]
    for one in processes:
        if one.returncode is None:
            one.kill()
            one.wait()
    return codes


def stderr_of(folder: Path, index: int) -> str:
    """Returns what a process wrote to standard error."""
    return (folder.parent / f"{SCRATCH}{index}" / "stderr").read_text()


def wait_for_steps(
    folder: Path, number: int, processes: list[subprocess.Popen[str]]
) -> None:
    """Waits until so many steps are released, or a process has ended."""
    while all(one.poll() is None for one in processes):
        ready = (folder / alone.READY).exists()
        if ready and len(alone.released_in(folder)) >= number:
            return
        time.sleep(0.005)


def kill_one(
    folder: Path,
    number: int,
    resume: bool,
    is_seeded: bool,
    kills: int,
    chance: random.Random,
    kind: str,
) -> tuple[dict[str, object], list[str]]:
    """Starts processes and kills one; returns the result and its violations."""
    before = len(alone.released_in(folder)) if resume else 0
    processes = started(folder, number, resume, is_seeded, kind)
    wait_for_steps(folder, before + chance.randrange(1, 18), processes)
    time.sleep(chance.uniform(0.0, 0.02))
    victim = chance.randrange(number)
    processes[victim].kill()
    begun = time.monotonic()
    codes = waited(processes, LIMIT_S)
    seconds = time.monotonic() - begun
    kill, wrong = alone.inspected(folder, kills, kind, is_seeded=is_seeded)
    if codes[victim] != -signal.SIGKILL:
        wrong.append(f"process {victim} had ended before it was killed ({codes})")
    for index, code in enumerate(codes):
        text = stderr_of(folder, index)
        if index == victim:
            continue
        if code is None:
            wrong.append(f"process {index} of {number} has not ended within a minute")
        elif code == 0 or not any(error in text for error in ERRORS):
            wrong.append(f"process {index} of {number} gave no error ({code}): {text}")
    for index in range(number):
        files = [p.name for p in (folder.parent / f"{SCRATCH}{index}").iterdir()]
        if files != ["stderr"]:
            wrong.append(f"process {index} wrote {files}")
    ours = sum("RunEndedError: " in stderr_of(folder, i) for i in range(number))
    found = {
        **kill._asdict(),
        "processes": number,
        "killed": victim,
        "seconds": round(seconds, 1),
        "told by us": ours,
    }
    return found, wrong


def rig(kills: int, scratch: Path, out: Path, *, seed: int, kind: str) -> Summary:
    """Trains and kills until that many processes were killed; see the module."""
    summary, chance = Summary(), random.Random(seed)
    begun = time.perf_counter()
    whole = scratch / "whole"
    (undisturbed,) = started(whole, 1, False, kind not in alone.UNSEEDED, kind)
    if undisturbed.wait() != 0:
        raise RuntimeError(stderr_of(whole, 0))
    while len(summary.kills) < kills and not summary.violations:
        folder = scratch / "run"
        number, resume = chance.choice(SIZES[1:]), False
        is_seeded = kind not in alone.UNSEEDED and summary.runs_finished % 2 == 0
        own = 0
        for _ in range(min(2, kills - len(summary.kills))):
            own += 1
            given = folder, number, resume, is_seeded, own, chance, kind
            kill, wrong = kill_one(*given)
            summary.kills.append(kill)
            summary.violations += wrong
            resume = bool(run_files.files_of_a_run(folder))
            number = chance.choice([n for n in SIZES[1:] if n != number])
            if summary.violations:
                return summary
        number = chance.choice(SIZES)
        codes = waited(started(folder, number, resume, is_seeded, kind), 900.0)
        if any(codes):
            summary.violations.append(
                f"{number} processes that resumed failed ({codes}): "
                f"{stderr_of(folder, 0)}"
            )
        else:
            like = whole if is_seeded else None
            summary.violations += alone.finished(folder, like, own)
            summary.runs_finished += not summary.violations
        shutil.rmtree(folder)
        summary.seconds = time.perf_counter() - begun
        written(summary, out)  # even if the rest fails
    return summary


def written(summary: Summary, out: Path) -> None:
    """Writes ``summary.json``."""
    kills = summary.kills
    ahead = Counter(int(str(k["charged"])) - int(str(k["released"])) for k in kills)
    facts = {
        "processes killed": len(kills),
        "of them the first of its run": sum(k["killed"] == 0 for k in kills),
        "runs finished": summary.runs_finished,
        "kills with charged = released": ahead[0],
        "kills with more charged than released": sum(ahead.values()) - ahead[0],
        "seconds until all had ended, at most": max(
            (float(str(k["seconds"])) for k in kills), default=0.0
        ),
        "violations": len(summary.violations),
        "seconds": round(summary.seconds),
    }
    moments = Counter(str(k["moment"]) for k in kills)
    document = {
        **provenance(),
        "facts": facts,
        "moments": dict(moments),
        "violations": summary.violations,
        "kills": kills,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Runs the rig; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=("charge-late",))
    parser.add_argument("--out", type=Path, default=Path("results/kill_distributed"))
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    parser.add_argument("--process", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        folder, *numbers = options.process
        port, number, index, resume, is_seeded = map(int, numbers)
        how = bool(resume), bool(is_seeded), options.kind
        process(Path(folder), port, number, index, *how)
        return 0
    if options.fault:
        os.environ["FAULT"] = options.fault
    with tempfile.TemporaryDirectory() as scratch:
        # A cache, so that not every process compiles again.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{scratch}/compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        runs = Path(scratch) / "runs"
        how = {"seed": options.seed, "kind": options.kind}
        summary = rig(options.kills, runs, options.out, **how)
    written(summary, options.out)
    print((options.out / "summary.json").read_text())
    return bool(summary.violations) or not summary.runs_finished


if __name__ == "__main__":
    sys.exit(main())
