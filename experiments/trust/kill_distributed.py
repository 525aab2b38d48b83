"""Kills one of several processes that train one run, and resumes with another number.

``python experiments/trust/kill_distributed.py --kills 20`` trains small private runs by
2 or 4 processes, of which one is killed with SIGKILL at a random moment. After it

* all other processes have ended within a minute, with an error that says why;
* the contract of ``kill_training.py`` holds;
* only the first process has written anything.

The run is then resumed with another number of processes (1, 2 or 4). Every second run
has a seed, and must end with the bits of an undisturbed single process. ``--fault
charge-late`` plants a fault that must be noticed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import kill_training as alone

from jaxdp_episodic.trainer.run import run_files

SIZES = (1, 2, 4)
alone.STEPS = 45  # each waits for several processes
LIMIT_S, HEARTBEATS_S = 60.0, 10
# Errors of the other processes; the second is JAX's own, if it comes first.
ERRORS = ("RunEndedError: ", "JAX distributed service detected fatal errors")
Processes = list[subprocess.Popen[str]]


def process(
    folder: Path, port: int, number: int, index: int, resume: int, is_seeded: int
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
    run = alone.made_trainer(1 if is_seeded else None)
    if resume:
        run.resume(folder)
    if index == 0:
        alone.train_before_a_witness(run, folder, os.environ.get("FAULT"))
    else:
        run.train(folder)


def own_folder(folder: Path, index: int) -> Path:
    """Returns where a process works, and writes its errors."""
    return folder.parent / f"scratch-{index}"


def stderr_of(folder: Path, index: int) -> str:
    """Returns what a process wrote to standard error."""
    return (own_folder(folder, index) / "stderr").read_text()


def started(folder: Path, number: int, resume: bool, is_seeded: bool) -> Processes:
    """Starts the processes of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / alone.READY).unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = []
    for index in range(number):
        own = own_folder(folder, index)
        own.mkdir(exist_ok=True)
        told = map(str, (folder, port, number, index, int(resume), int(is_seeded)))
        with open(own / "stderr", "w") as errors:
            made.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--process", *told],
                    cwd=own,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    text=True,
                )
            )
    return made


def waited(processes: Processes, seconds: float) -> list[int | None]:
    """Returns the exit codes; None for processes that have not ended in time."""
    end = time.monotonic() + seconds
    codes: list[int | None] = []
    for one in processes:
        try:
            codes.append(one.wait(max(end - time.monotonic(), 0.01)))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for one in processes:
        one.kill()
        one.wait()
    return codes


def wait_for_steps(folder: Path, number: int, processes: Processes) -> None:
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
) -> tuple[dict[str, Any], list[str]]:
    """Starts processes and kills one; returns the result and its violations."""
    before = len(alone.released_in(folder)) if resume else 0
    processes = started(folder, number, resume, is_seeded)
    wait_for_steps(folder, before + chance.randrange(1, 18), processes)
    time.sleep(chance.uniform(0.0, 0.02))
    victim = chance.randrange(number)
    processes[victim].kill()
    begun = time.monotonic()
    codes = waited(processes, LIMIT_S)
    seconds = round(time.monotonic() - begun, 1)
    kill, wrong = alone.inspected(folder, kills, is_seeded=is_seeded)
    if codes[victim] != -signal.SIGKILL:
        wrong.append(f"process {victim} had ended before it was killed ({codes})")
    for index, code in enumerate(codes):
        text, name = stderr_of(folder, index), f"process {index} of {number}"
        files = [path.name for path in own_folder(folder, index).iterdir()]
        if files != ["stderr"]:
            wrong.append(f"{name} wrote {files}")
        if index == victim:
            continue
        if code is None:
            wrong.append(f"{name} has not ended within a minute")
        elif code == 0 or not any(error in text for error in ERRORS):
            wrong.append(f"{name} gave no error ({code}): {text}")
    found = {"processes": number, "killed": victim, "seconds": seconds}
    return kill._asdict() | found, wrong


def rig(kills: int, scratch: Path, seed: int) -> alone.Summary:
    """Trains and kills until that many processes were killed; see the module."""
    summary, chance = alone.Summary(), random.Random(seed)
    begun = time.perf_counter()
    whole = scratch / "whole"
    if waited(started(whole, 1, False, True), 900.0) != [0]:
        raise RuntimeError(stderr_of(whole, 0))
    while len(summary.kills) < kills and not summary.violations:
        folder, own = scratch / "run", 0
        number, resume = chance.choice(SIZES[1:]), False
        is_seeded = summary.runs_finished % 2 == 0
        for own in range(1, 1 + min(2, kills - len(summary.kills))):
            kill, wrong = kill_one(folder, number, resume, is_seeded, own, chance)
            summary.kills.append(kill)
            summary.violations += wrong
            resume = bool(run_files.files_of_a_run(folder))
            number = chance.choice([n for n in SIZES[1:] if n != number])
            if summary.violations:
                return summary
        number = chance.choice(SIZES)
        codes = waited(started(folder, number, resume, is_seeded), 900.0)
        if any(codes):
            text = f"{number} processes that resumed failed ({codes}): "
            summary.violations.append(text + stderr_of(folder, 0))
        else:
            like = whole if is_seeded else None
            summary.violations += alone.finished(folder, like, own)
            summary.runs_finished += not summary.violations
        shutil.rmtree(folder)
        summary.seconds = time.perf_counter() - begun
    return summary


def main() -> int:
    """Runs the rig; returns the exit code."""
    parser = alone.parser_of(__doc__, 20, "kill_distributed")
    parser.add_argument("--fault", choices=("charge-late",))
    parser.add_argument("--process", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        folder, *numbers = options.process
        process(Path(folder), *map(int, numbers))
        return 0
    if options.fault:
        os.environ["FAULT"] = options.fault
    with alone.scratch() as folder:
        summary = rig(options.kills, folder / "runs", options.seed)
    first = sum(kill["killed"] == 0 for kill in summary.kills)
    longest = max((kill["seconds"] for kill in summary.kills), default=0.0)
    facts = {"of them the first of its run": first}
    facts |= {"seconds until all had ended, at most": longest}
    moments = Counter(kill["moment"] for kill in summary.kills)
    summary.write(options.out, moments, facts)
    return bool(summary.violations) or not summary.runs_finished


if __name__ == "__main__":
    sys.exit(main())
