"""Kills private training runs with SIGKILL at random moments, and resumes each.

``python experiments/trust/kill_training.py --kills 200 --out results/kill_training``
trains small private runs, each in a process of its own that is killed at a random
moment, and goes on with ``resume`` until they are finished. A witness beside the run
notes every release (step number and a hash of all that was released, the moment the
journal has it), independently of the ledger. After every kill:

* charged steps are at least the released ones, and at most one more for each kill;
* no step was released twice.

After every finished run its ledger has exactly its steps. Every second run has a seed,
and then its parameters are those of a run that nobody disturbed. ``summary.json`` and
``summary.md`` say how it went; the exit code is 1 if anything was not so. ``--fault
NAME`` plants a fault that must be noticed: "charge-late" charges after the release,
"forget" resumes from an older ledger.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import optax
from flax import nnx
from provenance import provenance

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget
from jaxdp_episodic.accountant.report.ledger_file import (
    CHARGE,
    LedgerError,
    read_ledger,
)
from jaxdp_episodic.data import ExampleTable
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.journal import Journal
from jaxdp_episodic.training import MLP, ProtoNet, Trainer, split_model

FAULTS = ("charge-late", "forget")
WAYS, SHOTS, CLASSES, EXAMPLES = 3, 1, 12, 5
STEPS, CHECKPOINT_EVERY, DELTA, NOISE = 120, 11, 1e-5, 1.0
# Runs with the same seed share one undisturbed run.
SEEDS = 5
WITNESS, READY, PARAMETERS = "released.txt", "ready", "parameters.npz"


class PlainBudget(PrivacyBudget):
    """Its epsilon is that of the Gaussian noise without any sampling.

    An upper bound by Bun and Steinke (2016), arXiv:1605.02065, Proposition 1.3; no
    process has to compile the accountant, of which nothing is tested here.
    """

    def spent(self, num_steps: Any) -> Any:
        """Returns epsilon after that many steps (*upper bound*)."""
        rho = np.asarray(num_steps) / (2 * NOISE**2)
        return rho + 2 * np.sqrt(rho * np.log(1 / self.delta))


class Kill(NamedTuple):
    """What was found after one kill.

    Attributes:
      moment: what the process was doing, as far as its files show.
      released: steps that the witness saw so far, each counted once.
      charged: steps in the ledger.
      checkpoint: steps in the latest checkpoint.
    """

    moment: str
    released: int
    charged: int
    checkpoint: int


@dataclass
class Summary:
    """All that was seen; see the module."""

    kills: list[Kill] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    runs_finished: int = 0
    runs_seeded: int = 0
    runs_equal: int = 0
    releases: int = 0
    seconds: float = 0.0


def data() -> ExampleTable:
    """Returns classes in the plane, each a cluster."""
    rng = np.random.default_rng(0)
    centers = 3 * rng.normal(size=(CLASSES, 1, 2))
    points = centers + 0.3 * rng.normal(size=(CLASSES, EXAMPLES, 2))
    return ExampleTable.from_records(
        points.reshape(-1, 2),
        units={"class": np.repeat(np.arange(CLASSES), EXAMPLES)},
    )


def made_trainer(seed: int | None) -> Trainer:
    """Returns a run whose steps take a few milliseconds."""
    sampling = jde.GroupedClasses(
        num_classes=CLASSES,
        ways=WAYS,
        episodes=jde.Poisson("episode", sampling_probability=0.5),
        examples=jde.WithoutReplacement("example", size=3, population=EXAMPLES),
    )
    step = jde.GaussianStep(sampling, noise_multiplier=NOISE)
    apply, params = split_model(MLP(2, (8,), 4, rngs=nnx.Rngs(0)))
    return Trainer(
        ProtoNet(apply, ways=WAYS),
        params,
        data=data(),
        budget=PlainBudget(step, 1e9, DELTA, STEPS, STEPS),
        shots=SHOTS,
        optimizer=optax.adam(0.05),
        l2_clip_norm=0.5,
        seed=seed,
    )


def train_in(folder: Path, seed: int | None, fault: str | None) -> None:
    """Starts or goes on with a run; writes its parameters when it is finished."""
    run = made_trainer(seed)
    if run_files.files_of_a_run(folder):
        run.resume(folder)
    train_before_a_witness(run, folder, fault)


def train_before_a_witness(run: Trainer, folder: Path, fault: str | None) -> None:
    """Trains a run whose releases are noted; writes its parameters at the end."""
    witness = os.open(folder / WITNESS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    append = Journal.append

    def witnessed(journal: Journal, step: int, data: bytes) -> None:
        append(journal, step, data)
        os.write(witness, f"{step} {hashlib.sha256(data).hexdigest()}\n".encode())

    if fault == "charge-late":
        plant_late_charges(run)
    (folder / READY).touch()
    with mock.patch.object(Journal, "append", witnessed):
        run.train(folder, checkpoint_every=CHECKPOINT_EVERY)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(run.state)]
    np.savez(folder / PARAMETERS, allow_pickle=False, **named(leaves))


def plant_late_charges(run: Trainer) -> None:
    """Makes a run charge each step to its file when the next one begins."""
    ledger: Any = run.ledger
    late: list[int] = []

    class Late:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def charge(self, number: int = 1) -> None:
            if late:
                self._file.charge(late.pop())
            late.append(number)

    charge = ledger.charge

    def charged() -> int:
        if not isinstance(ledger._file, Late):
            ledger._file = Late(ledger._file)
        return charge()

    ledger.charge = charged


def named(leaves: list[np.ndarray]) -> dict[str, Any]:
    """Returns arrays under the names of their places."""
    return {f"{place:03d}": leaf for place, leaf in enumerate(leaves)}


def released_in(folder: Path) -> dict[int, list[str]]:
    """Returns steps, and the hashes of what was released of each, in a run's folder."""
    path = folder / WITNESS
    found: dict[int, list[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        number, _, value = line.partition(" ")
        found.setdefault(int(number), []).append(value)
    return found


def inspected(folder: Path, kills: int) -> tuple[Kill, list[str]]:
    """Returns what a process killed last left, and what is wrong with it.

    Args:
      folder: of the run.
      kills: processes of the run that were killed so far.
    """
    released = released_in(folder)
    steps = len(released)
    path = folder / run_files.LEDGER
    if not path.exists():
        wrong = ["released without a ledger"] if steps else []
        return Kill("before the ledger was made", steps, 0, 0), wrong
    try:
        charged = read_ledger(path).charged
    except LedgerError as error:
        return Kill("(damaged ledger)", steps, -1, 0), [str(error)]
    checkpoints = folder / run_files.CHECKPOINTS
    names = [p.name for p in checkpoints.iterdir()] if checkpoints.is_dir() else []
    latest = max((int(n) for n in names if n.isdigit()), default=0)
    moment = "between two steps"
    if any(not name.isdigit() for name in names):
        moment = "while a checkpoint was written"
    elif charged not in released and charged > latest:
        moment = "between charge and release"
    return Kill(moment, steps, charged, latest), violations(released, charged, kills)


def violations(released: dict[int, list[str]], charged: int, kills: int) -> list[str]:
    """Returns what of the contract does not hold."""
    steps, wrong = len(released), []
    if not steps <= charged <= steps + kills:
        wrong.append(f"{steps} steps released, {charged} charged, {kills} killed")
    again = [number for number, values in released.items() if len(values) > 1]
    if again:
        wrong.append(f"step {min(again)} was released again")
    return wrong


def finished(folder: Path, whole: Path | None, kills: int) -> list[str]:
    """Returns what is wrong with a run that was killed, against one that was not."""
    _, wrong = inspected(folder, kills)
    if read_ledger(folder / run_files.LEDGER).charged != STEPS:
        wrong.append("the ledger has not the steps of the run")
    if whole is None:
        return wrong
    with np.load(folder / PARAMETERS) as ours, np.load(whole / PARAMETERS) as theirs:
        if any(not np.array_equal(ours[name], theirs[name]) for name in theirs):
            wrong.append("the parameters are not those of an undisturbed run")
    return wrong


def forget_charges(folder: Path) -> None:
    """Takes the last charges out of a ledger: the planted fault."""
    path = folder / run_files.LEDGER
    text = path.read_bytes() if path.exists() else b""
    while text.endswith(CHARGE):
        text = text[: -len(CHARGE)]
    if text:
        path.write_bytes(text)


def rig(
    kills: int, out: Path, *, random_seed: int, fault: str | None = None
) -> Summary:
    """Trains and kills until that many processes were killed; see the module."""
    summary, chance = Summary(), random.Random(random_seed)
    begun = time.perf_counter()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jaxdp_episodic.training"])

    def started(folder: Path, number: int | None) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / READY).unlink(missing_ok=True)
        process = context.Process(target=train_in, args=(folder, number, fault))
        process.start()
        return process

    while len(summary.kills) < kills and not summary.violations:
        number = summary.runs_finished % SEEDS
        seed = None if summary.runs_finished % 2 else number
        whole, killed = out / f"whole-{number}", 0
        if not whole.exists():
            undisturbed = started(whole, number)
            undisturbed.join()
            if undisturbed.exitcode != 0:
                raise RuntimeError("the undisturbed run failed")
        folder = out / f"run-{summary.runs_finished}"
        window = 0.6 * training_seconds(whole)
        while not summary.violations:
            process = started(folder, seed)
            if len(summary.kills) < kills:
                wait_until_ready(folder, process)
                process.join(chance.uniform(0.0, window))
                process.kill()
            process.join()
            if process.exitcode == 0:
                break
            if process.exitcode == -signal.SIGKILL:
                killed += 1
                kill, wrong = inspected(folder, killed)
                summary.kills.append(kill)
                if fault == "forget":
                    forget_charges(folder)
            else:
                wrong = [f"a resumed process failed ({process.exitcode})"]
            summary.violations += wrong
        if not summary.violations:
            wrong = finished(folder, None if seed is None else whole, killed)
            summary.violations += wrong
            summary.runs_finished += 1
            summary.runs_seeded += seed is not None
            summary.runs_equal += seed is not None and not wrong
        summary.releases += len(released_in(folder))
        shutil.rmtree(folder)
    summary.seconds = time.perf_counter() - begun
    return summary


def wait_until_ready(folder: Path, process: Any) -> None:
    """Waits until training begins, or the process has ended."""
    while process.is_alive() and not (folder / READY).exists():
        time.sleep(0.002)


def training_seconds(folder: Path) -> float:
    """Returns how long a finished run trained, from the times of its files."""
    begun = (folder / READY).stat().st_mtime
    return (folder / PARAMETERS).stat().st_mtime - begun


def written(summary: Summary, out: Path) -> None:
    """Writes ``summary.json`` and ``summary.md``."""
    ahead = Counter(kill.charged - kill.released for kill in summary.kills)
    moments = Counter(kill.moment for kill in summary.kills)
    facts = {
        "processes killed": len(summary.kills),
        "runs finished": summary.runs_finished,
        "of them with a seed, equal to an undisturbed run bit for bit": (
            summary.runs_equal
        ),
        "steps released": summary.releases,
        "kills with charged = released": ahead[0],
        "kills with more charged than released": sum(ahead.values()) - ahead[0],
        "violations": len(summary.violations),
        "seconds": round(summary.seconds),
    }
    out.mkdir(parents=True, exist_ok=True)
    document = {
        **provenance(),
        "facts": facts,
        "moments": dict(moments),
        "violations": summary.violations,
        "kills": [kill._asdict() for kill in summary.kills],
    }
    (out / "summary.json").write_text(json.dumps(document, indent=1) + "\n")
    rows = [f"| {name} | {value:,} |" for name, value in facts.items()]
    rows += [f"| killed {name} | {value:,} |" for name, value in moments.items()]
    page = ["# Training runs killed at random moments", "", "| | |", "|---|---|"]
    page += [*rows, "", *[f"* **{text}**" for text in summary.violations]]
    (out / "summary.md").write_text("\n".join(page).rstrip() + "\n")


def main() -> int:
    """Runs the rig; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--out", type=Path, default=Path("results/kill_training"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        # Processes that begin again and again shall not compile again and again.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{scratch}/compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        summary = rig(
            options.kills, Path(scratch), random_seed=options.seed, fault=options.fault
        )
    written(summary, options.out)
    print((options.out / "summary.md").read_text())
    return bool(summary.violations) or summary.runs_equal != summary.runs_seeded


if __name__ == "__main__":
    sys.exit(main())
