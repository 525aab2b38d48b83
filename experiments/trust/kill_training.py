"""Kills private training runs with SIGKILL at random moments, and resumes each.

``python experiments/trust/kill_training.py --kills 200`` trains small private runs of
seven kinds in turn, each in a process of its own. It is killed at random moments, a
third of them between charge and release, and resumed until the run is
finished. A witness notes every release (step number and a hash of the arrays, as soon
as the file has them), every noise and every sum without noise. After every kill:

* charged steps are at least the released ones, and at most one more for each kill;
* no step was released twice;
* without a seed no noise was used for two sums, and no sum was made twice;
* with correlated noise nothing that the process remembered is in any file of the run.

Of each kind but the last three every second run has a seed, and must end like an
undisturbed run. ``--fault NAME`` plants a fault that must be noticed: "charge-late"
charges after the release, "forget" resumes from a file without the last charges.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
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
from jaxdp_episodic import training
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget
from jaxdp_episodic.data import ExampleTable
from jaxdp_episodic.tools.book.book import create_book
from jaxdp_episodic.tools.train.run import protected_by
from jaxdp_episodic.trainer.gradient.noise import BandMemory
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.ledger_file import LedgerError, read_ledger
from jaxdp_episodic.trainer.run.store import RunStore
from jaxdp_episodic.training import Booking, PrivateGradient, Trainer, read_config

FAULTS = ("charge-late", "forget")
WAYS, SHOTS, CLASSES, EXAMPLES = 3, 1, 12, 5
STEPS, CHECKPOINT_EVERY, DELTA, NOISE = 120, 11, 1e-5, 1.0
LATE = 1 / 3  # share of the kills that are between charge and release
MOST_KILLS = 8  # of a run, which makes little progress between kills if others work
# Runs with the same seed share one undisturbed run.
SEEDS = 2
BANDED = ("banded", "banded adaptive")
KINDS = ("plain", "statistics", "adaptive", "epochs", "booked", *BANDED)
UNSEEDED = ("booked", *BANDED)
FIRST_SUMS = 6  # a process that ends itself within a step does so at one of these
PIECE = 128  # bytes of an array that are searched for
WITNESS, READY, PARAMETERS = "released.txt", "ready", "parameters.npz"


class PlainBudget(PrivacyBudget):
    """Its epsilon is that of the Gaussian noise without any sampling.

    An upper bound by Bun and Steinke (2016), arXiv:1605.02065, Proposition 1.3; no
    process has to compile the accountant, which is not tested here.
    """

    def spent(self, num_steps: Any) -> Any:
        """Returns epsilon after that many steps (*upper bound*)."""
        rho = np.asarray(num_steps) / (2 * NOISE**2)
        return rho + 2 * np.sqrt(rho * np.log(1 / self.delta))


class Kill(NamedTuple):
    """What was found after one kill."""

    kind: str  # of the run
    moment: str  # what the process was doing, as far as its files show
    released: int  # steps that the witness saw so far, each counted once
    charged: int  # steps in the run's file
    checkpoint: int  # steps in its state


@dataclass
class Summary:
    """All results; see the module."""

    kills: list[Any] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    runs_finished: int = 0
    runs_seeded: int = 0
    runs_equal: int = 0
    releases: int = 0
    seconds: float = 0.0

    def write(self, out: Path, moments: Counter[str], facts: dict[str, Any]) -> None:
        """Writes ``summary.json``, and prints it; kills are dictionaries."""
        ahead = sum(kill["charged"] > kill["released"] for kill in self.kills)
        all_facts = {
            "processes killed": len(self.kills),
            "runs finished": self.runs_finished,
            "kills with charged = released": len(self.kills) - ahead,
            "kills with more charged than released": ahead,
            **facts,
            "violations": len(self.violations),
            "seconds": round(self.seconds),
        }
        found = {"violations": self.violations, "kills": self.kills}
        document = {"facts": all_facts, "moments": dict(moments), **found}
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**provenance(), **document}, indent=1)
        (out / "summary.json").write_text(text + "\n")
        print(text)


def data(seed: int = 0) -> ExampleTable:
    """Returns data of classes that are clusters in the plane."""
    rng = np.random.default_rng(seed)
    centers = 3 * rng.normal(size=(CLASSES, 1, 2))
    points = centers + 0.3 * rng.normal(size=(CLASSES, EXAMPLES, 2))
    return ExampleTable.from_records(
        points.reshape(-1, 2), units={"class": np.repeat(np.arange(CLASSES), EXAMPLES)}
    )


def episodes(scheme: Any) -> Any:
    """Returns the sampling of a run, with episodes drawn by a scheme."""
    return jde.GroupedClasses(
        num_classes=CLASSES,
        ways=WAYS,
        episodes=scheme,
        examples=jde.WithoutReplacement("example", size=3, population=EXAMPLES),
    )


def made_trainer(seed: int | None, kind: str = "plain") -> Trainer:
    """Returns a run whose steps take a few milliseconds."""
    scheme: Any = jde.Poisson("episode", sampling_probability=0.5)
    if kind == "epochs":
        scheme = jde.RandomAllocation("episode", steps_per_epoch=7)
    relation = "zero_out" if kind in ("statistics", *BANDED) else "add_remove"
    step = jde.GaussianStep(
        episodes(scheme), noise_multiplier=NOISE, neighboring_relation=relation
    )
    if kind in BANDED:
        step = jde.banded(step, jde.Bands(4, level="class"))
    apply, params = training.split_model(training.MLP(2, (8,), 4, rngs=nnx.Rngs(0)))
    table, start, before = data(), None, ()
    if kind == "statistics":
        config = training.StartConfig(mean=0.2, within=(0.3,), total=0.5, dimensions=2)
        whom: Any = {"privacy_unit": "example", "neighboring_relation": relation}
        start = training.PrivateStatistics(table, config, slots=EXAMPLES, **whom)
        before = tuple(
            dataclasses.replace(one, noise_multiplier=NOISE) for one in start.steps
        )
    common: Any = {"data": table, "shots": SHOTS, "l2_clip_norm": 0.5, "seed": seed}
    common["optimizer"] = optax.adam(0.05)
    learner = training.ProtoNet(apply, ways=WAYS)
    if not kind.endswith("adaptive"):
        budget = PlainBudget(step, 1e9, DELTA, STEPS, STEPS, before)
        return Trainer(learner, params, budget=budget, start=start, **common)
    everyone = episodes(jde.Poisson("episode", sampling_probability=1.0))
    check = dataclasses.replace(
        step, sampling=everyone, noise_multiplier=5.0, bands=None
    )
    quotas = {"step": STEPS - 20, "check": 20}
    run = jde.AdaptiveRun({"step": step, "check": check}, quotas=quotas)
    score = training.PrivateValidation(data(1), check, shots=SHOTS)
    budget = training.AdaptiveBudget((run,), DELTA, checks=("check",))
    own: Any = {"budget": budget, "rule": by_scores, "checks": {"check": score}}
    return training.AdaptiveTrainer(learner, params, **own, **common)


def by_scores(released: Any) -> str | None:
    """A rule that uses every public value, until no option is left."""
    last = released.scores[-1].value if released.scores else 0.0
    names = [name for name in sorted(released.left) if released.left[name]]
    return names[int(1e4 * abs(last) + released.number) % len(names)] if names else None


BOOKED = f"""
version = 1
epsilon = 8.0
delta = 1e-5
num_steps = {STEPS}
checkpoint_every = {CHECKPOINT_EVERY}
l2_clip_norm = 0.1
data = {{ type = "Glyphs", small = true }}
learner = {{ kind = "protonet", shots = 1 }}
model = {{ kind = "conv_embedding", channels = [4], embedding = 4 }}
[step.sampling]
type = "GroupedClasses"
num_classes = 40
ways = 4
episodes = {{ type = "Poisson", name = "episode", sampling_probability = 0.5 }}
examples = {{ type = "WithoutReplacement", name = "example", size = 3, population=20 }}
"""


def train_in(
    folder: Path, seed: int | None, fault: str | None, kind: str = "plain", at: int = 0
) -> None:
    """Starts or resumes a run; writes its parameters when it is finished.

    ``at``: number of the sum without noise at which it kills itself; 0: never.
    """
    resumes = bool(run_files.files_of_a_run(folder))
    if kind == "booked":
        config = read_config(folder.parent / "booked.toml")
        book = Booking(str(folder.parent / "runs.book"))
        with witnessed(folder, at):
            result = training.run_training(config, folder, resume=resumes, book=book)
        write_parameters(result.trainer, folder)
        return
    run = made_trainer(seed, kind)
    if resumes:
        run.resume(folder)
    train_before_a_witness(run, folder, fault, at)


def train_before_a_witness(
    run: Trainer, folder: Path, fault: str | None, ends_at: int = 0
) -> None:
    """Trains a run beside a witness; writes its parameters at the end."""
    planted = late_charges(run) if fault == "charge-late" else contextlib.nullcontext()
    with planted, witnessed(folder, ends_at):
        run.train(folder, checkpoint_every=CHECKPOINT_EVERY)
    write_parameters(run, folder)


def write_parameters(run: Trainer, folder: Path) -> None:
    """Writes the state of a finished run."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(run.state)]
    np.savez(folder / PARAMETERS, *leaves, allow_pickle=False)


@contextlib.contextmanager
def witnessed(folder: Path, ends_at: int = 0) -> Iterator[None]:
    """Writes releases, noise and sums without noise to a file, one per line."""
    sums = itertools.count(1)
    witness = os.open(folder / WITNESS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    release, total = RunStore.release, PrivateGradient._sum
    call = PrivateGradient.__call__

    def note(what: Any, tree: Any) -> None:
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        if any(array.any() for array in arrays):  # an empty draw has the sum 0
            value = hashlib.sha256(b"".join(array.tobytes() for array in arrays))
            os.write(witness, f"{what} {value.hexdigest()}\n".encode())

    def released(store: RunStore, step: int, arrays: Any) -> None:
        release(store, step, arrays)
        note(step, arrays)

    def summed(gradient: Any, *given: Any) -> Any:
        totals = total(gradient, *given)
        note("sum", totals.gradient)
        if next(sums) == ends_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return totals

    def called(gradient: Any, params: Any, blocks: Any, noise: Any, **more: Any) -> Any:
        if noise is not None:
            note("noise", noise._unused)
        return call(gradient, params, blocks, noise, **more)

    def remembered(memory: BandMemory, sums: Any, drawn: Any) -> Any:
        with memory_of(folder).open("ab") as file:
            for leaf in (*sums, *drawn):
                if leaf.nbytes >= PIECE and leaf.any():
                    file.write(leaf.tobytes()[:PIECE])
        return encode(memory, sums, drawn)

    (folder / READY).touch()
    encode = BandMemory.release
    with (
        mock.patch.object(BandMemory, "release", remembered),
        mock.patch.object(RunStore, "release", released),
        mock.patch.object(PrivateGradient, "_sum", summed),
        mock.patch.object(PrivateGradient, "__call__", called),
    ):
        yield


@contextlib.contextmanager
def late_charges(run: Trainer) -> Iterator[None]:
    """Makes a run charge each step to its file when the next one begins."""
    ledger: Any = run.ledger
    charge = ledger.charge

    def charged() -> int:
        store, ledger._store = ledger._store, None
        number = charge()
        ledger._store = store
        if store is not None and number > store.mark.charged + 1:
            store.charge(*ledger._kind(number - 1))
        return number

    def release(store: RunStore, number: int, arrays: Any) -> None:
        with store._commit() as db:  # without looking at what is charged
            store._put(db, "release", number, arrays)

    ledger.charge = charged
    with mock.patch.object(RunStore, "release", release):
        yield


def released_in(folder: Path) -> dict[int, list[str]]:
    """Returns the released steps in a run's folder, with the hashes of their arrays."""
    path = folder / WITNESS
    found: dict[int, list[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        number, _, value = line.partition(" ")
        if number.isdigit():
            found.setdefault(int(number), []).append(value)
    return found


def memory_of(folder: Path) -> Path:
    """Returns the file, outside the run's folder, with what a process remembered."""
    return folder.with_name(f"{folder.name}-memory")


def at_rest(folder: Path) -> list[str]:
    """Returns whether a file of the run has a piece of what a process remembered."""
    path = memory_of(folder)
    raw = path.read_bytes() if path.exists() else b""
    pieces = [raw[i : i + PIECE] for i in range(0, len(raw), PIECE)]
    files = [one.read_bytes() for one in folder.rglob("*") if one.is_file()]
    found = any(piece in file for piece in pieces for file in files)
    return ["sums without noise, or noise, in the run's files"] if found else []


def used_twice(folder: Path) -> list[str]:
    """Returns the noise and the sums without noise that a witness has seen twice."""
    path = folder / WITNESS
    lines = Counter(path.read_text().splitlines() if path.exists() else [])
    found = {line.split()[0] for line, number in lines.items() if number > 1}
    return sorted(f"the same {name} twice" for name in found if not name.isdigit())


def inspected(
    folder: Path,
    kills: int,
    kind: str = "plain",
    *,
    is_seeded: bool = True,
    before: int = -1,
) -> tuple[Kill, list[str]]:
    """Returns the state of a run after so many kills, and its violations.

    ``before``: steps charged at the start. A run with a seed repeats the same noise.
    """
    released = released_in(folder)
    steps = len(released)
    path = folder / run_files.STORE
    if not path.exists():
        wrong = ["released without a file"] if steps else []
        return Kill(kind, "before the file was made", steps, 0, 0), wrong
    try:
        charged, latest = read_ledger(path).charged, latest_state(folder)
    except LedgerError as error:
        return Kill(kind, "(damaged file)", steps, -1, 0), [str(error)]
    moment = "between two steps"
    if charged == before:
        moment = "before its first charge"
    elif charged not in released and charged > latest:
        moment = "between charge and release"
    wrong = violations(released, charged, kills) + at_rest(folder)
    if not is_seeded:
        wrong += used_twice(folder)
    return Kill(kind, moment, steps, charged, latest), wrong


def latest_state(folder: Path) -> int:
    """Returns the steps in the state of a copy of a run's file; 0 without one."""
    with tempfile.TemporaryDirectory() as scratch:
        for path in folder.glob(run_files.STORE + "*"):
            shutil.copy(path, scratch)
        with contextlib.closing(RunStore(Path(scratch, run_files.STORE))) as store:
            saved = store.saved()
            return 0 if saved is None else saved.taken


def violations(released: dict[int, list[str]], charged: int, kills: int) -> list[str]:
    """Returns the violations of the contract."""
    steps, wrong = len(released), []
    if not steps <= charged <= steps + kills:
        wrong.append(f"{steps} steps released, {charged} charged, {kills} killed")
    again = [number for number, values in released.items() if len(values) > 1]
    if again:
        wrong.append(f"step {min(again)} was released again")
    return wrong


def finished(folder: Path, whole: Path | None, kills: int) -> list[str]:
    """Returns the differences between a killed run and an undisturbed one."""
    _, wrong = inspected(folder, kills)
    if read_ledger(folder).charged != STEPS:
        wrong.append("the file has not the steps of the run")
    if whole is None:
        return wrong
    with np.load(folder / PARAMETERS) as ours, np.load(whole / PARAMETERS) as theirs:
        if any(not np.array_equal(ours[name], theirs[name]) for name in theirs):
            wrong.append("the parameters are not those of an undisturbed run")
    return wrong


def forget_charges(folder: Path) -> None:
    """Plants the fault: removes the last charges, and what belongs to them."""
    path = folder / run_files.STORE
    if path.exists():
        with contextlib.closing(sqlite3.connect(path)) as file:
            for table in ("charges", "arrays"):
                last = file.execute("SELECT max(number) FROM charges").fetchone()[0]
                more = " AND kind = 'release'" if table == "arrays" else ""
                number = (last or 0) - 1
                file.execute(f"DELETE FROM {table} WHERE number > {number}{more}")
            file.commit()


def rig(kills: int, out: Path, random_seed: int, fault: str | None) -> Summary:
    """Trains and kills until that many processes were killed; see the module."""
    summary, chance = Summary(), random.Random(random_seed)
    begun = time.perf_counter()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jaxdp_episodic.training"])
    make_book(out)

    def started(folder: Path, number: int | None, kind: str, ends_at: int = 0) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / READY).unlink(missing_ok=True)
        given = folder, number, fault, kind, ends_at
        process = context.Process(target=train_in, args=given)
        process.start()
        return process

    while len(summary.kills) < kills and not summary.violations:
        turn, place = divmod(summary.runs_finished, len(KINDS))
        kind, number = KINDS[place], turn % SEEDS
        seed = None if turn % 2 or kind in UNSEEDED else number
        whole, killed, charged = out / f"whole-{kind}-{number}", 0, -1
        if not whole.exists():
            undisturbed = started(whole, seed if seed is None else number, kind)
            undisturbed.join()
            if undisturbed.exitcode != 0:
                raise RuntimeError("the undisturbed run failed")
        folder = out / f"run-{summary.runs_finished}"
        window = 0.6 * training_seconds(whole)
        while not summary.violations:
            is_killed = len(summary.kills) < kills and killed < MOST_KILLS
            is_late = is_killed and chance.random() < LATE
            ends_at = chance.randint(1, FIRST_SUMS) if is_late else 0
            process = started(folder, seed, kind, ends_at)
            if is_killed and not is_late:
                while process.is_alive() and not (folder / READY).exists():
                    time.sleep(0.002)
                process.join(chance.uniform(0.0, window))
                process.kill()
            process.join()
            if process.exitcode == 0:
                break
            if process.exitcode != -signal.SIGKILL:
                wrong = [f"a resumed process failed ({process.exitcode})"]
                summary.violations += wrong
                break
            killed += 1
            told: Any = {"is_seeded": seed is not None, "before": charged}
            kill, wrong = inspected(folder, killed, kind, **told)
            charged = kill.charged
            summary.kills.append(kill._asdict())
            summary.violations += wrong
            if fault == "forget":
                forget_charges(folder)
        if not summary.violations:
            wrong = finished(folder, None if seed is None else whole, killed)
            wrong += used_twice(folder) if seed is None else []
            summary.violations += wrong
            summary.runs_finished += 1
            summary.runs_seeded += seed is not None
            summary.runs_equal += seed is not None and not wrong
        summary.releases += len(released_in(folder))
        shutil.rmtree(folder)
        memory_of(folder).unlink(missing_ok=True)
    summary.seconds = time.perf_counter() - begun
    return summary


def make_book(folder: Path) -> None:
    """Makes a book with room for many runs, and the config that they have."""
    (folder / "booked.toml").write_text(BOOKED)
    config = read_config(folder / "booked.toml")
    where = str(folder / "runs.book")
    create_book(where, protected_by(config, folder), epsilon=50.0, delta=1e-3)


def training_seconds(folder: Path) -> float:
    """Returns how long a finished run trained, from the times of its files."""
    begun = (folder / READY).stat().st_mtime
    return (folder / PARAMETERS).stat().st_mtime - begun


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder, and a cache in it, so that not every process compiles again."""
    with tempfile.TemporaryDirectory() as name:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{name}/compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        yield Path(name)


def parser_of(doc: str | None, kills: int, out: str) -> argparse.ArgumentParser:
    """Returns the options of both rigs."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results") / out)
    return parser


def main() -> int:
    """Runs the rig; returns the exit code."""
    parser = parser_of(__doc__, 200, "kill_training")
    parser.add_argument("--fault", choices=FAULTS)
    options = parser.parse_args()
    with scratch() as folder:
        summary = rig(options.kills, folder, options.seed, options.fault)
    equal = "of them with a seed, equal to an undisturbed run bit for bit"
    moments = Counter(kill["moment"] for kill in summary.kills)
    moments.update(f"in a run of kind {kill['kind']}" for kill in summary.kills)
    facts = {equal: summary.runs_equal, "steps released": summary.releases}
    summary.write(options.out, moments, facts)
    return bool(summary.violations) or summary.runs_equal != summary.runs_seeded


if __name__ == "__main__":
    sys.exit(main())
