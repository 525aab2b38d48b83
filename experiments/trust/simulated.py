"""The designs that `audit.py` simulates, each at two settings of its rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

import jaxdp_episodic as jde
from jaxdp_episodic._progress import ProgressBar
from jaxdp_episodic.audit import (
    AuditRow,
    MechanismAudit,
    audit_mechanism,
    mechanism_rows,
)
from jaxdp_episodic.trainer.audit.mechanism import total_draws
from jaxdp_episodic.trainer.audit.worst_case import (
    dominating_branches,
    tables_of_run,
    worst_case,
)

DELTA = 1e-5
SETTINGS = ((0.2, 0.5, 1.0), (0.05, 0.1, 0.7))
EXAMPLES = 100

Poisson, Fixed = jde.Poisson, jde.WithoutReplacement


def two_levels(task: Any, inner_rate: float, noise: float, **more: Any) -> Any:
    """Tasks drawn by a scheme, then a share of each drawn task's examples."""
    drawn = round(inner_rate * EXAMPLES)
    example = Fixed("example", size=drawn, population=EXAMPLES)
    sampling = jde.MultistageSampling(task, example)
    settings = {"clip_unit": "task", "privacy_unit": "example", **more}
    return jde.GaussianStep(sampling, noise_multiplier=noise, **settings)


def grouped(scheme: dict[str, Any], inner_rate: float, noise: float) -> Any:
    """Five-way episodes of 1,000 classes."""
    drawn = round(inner_rate * EXAMPLES)
    sampling = jde.GroupedClasses(
        num_classes=1_000,
        ways=5,
        examples=Fixed("example", size=drawn, population=EXAMPLES),
        **scheme,
    )
    return jde.GaussianStep(sampling, noise_multiplier=noise)


def designs(p: float, inner_rate: float, noise: float) -> dict[str, Any]:
    """Steps of every kind, at the same rates and, but for two, the same noise."""
    # Where one unit contributes much more, its epsilon at this noise is beyond what
    # 10^8 draws can show.
    more, most = 2 * noise, 6 * noise
    tasks = Fixed("task", size=round(p * 1_000), population=1_000)
    coins = Poisson("task", sampling_probability=p)
    every_class = Fixed("class", size=round(p * 1_000), population=1_000)
    episodes = Poisson("episode", sampling_probability=p)
    both = round(p * inner_rate * 1_000)
    return {
        "tasks by coins, examples": two_levels(coins, inner_rate, noise),
        "tasks without replacement, examples": two_levels(tasks, inner_rate, noise),
        "tasks by coins, one replaced": two_levels(
            coins, inner_rate, noise, neighboring_relation="replace_one"
        ),
        "grouped, episodes by coins": grouped(
            {"episodes": episodes}, inner_rate, noise
        ),
        "grouped, classes without replacement": grouped(
            {"classes": every_class}, inner_rate, noise
        ),
        "examples by coins": jde.GaussianStep(
            Poisson("example", sampling_probability=p * inner_rate),
            noise_multiplier=noise,
        ),
        "examples without replacement": jde.GaussianStep(
            Fixed("example", size=both, population=1_000), noise_multiplier=noise
        ),
        "examples clipped, of drawn tasks": two_levels(
            coins, inner_rate, more, clip_unit="example"
        ),
        "four independent episodes": jde.GaussianStep(
            jde.IndependentEpisodes(
                jde.MultistageSampling(
                    Fixed("class", size=round(p * 1_000), population=1_000),
                    Fixed(
                        "example",
                        size=round(inner_rate * EXAMPLES),
                        population=EXAMPLES,
                    ),
                ),
                num_episodes=4,
            ),
            noise_multiplier=most,
        ),
    }


def epoch_designs(p: float, inner_rate: float, noise: float) -> dict[str, Any]:
    """Steps of the designs by epochs, 1/p steps to an epoch."""
    steps = round(1 / p)
    bins = jde.RandomAllocation("example", steps_per_epoch=steps)
    batches = jde.ShuffledEpochs("example", steps_per_epoch=steps)
    episodes = jde.RandomAllocation("episode", steps_per_epoch=steps)
    twice = jde.RandomAllocation("example", steps_per_epoch=steps, times=2)
    return {
        "examples in bins": jde.GaussianStep(bins, noise_multiplier=noise),
        "examples in bins, one replaced": jde.GaussianStep(
            bins, noise_multiplier=noise, neighboring_relation="replace_one"
        ),
        "examples in two bins of an epoch": jde.GaussianStep(
            twice, noise_multiplier=noise
        ),
        "tasks in bins, examples": two_levels(
            jde.RandomAllocation("task", steps_per_epoch=steps), inner_rate, noise
        ),
        "grouped, episodes in bins": grouped({"episodes": episodes}, inner_rate, noise),
        # Without amplification, so with more noise.
        "examples in shuffled epochs": jde.GaussianStep(
            batches, noise_multiplier=3 * noise, neighboring_relation="replace_one"
        ),
    }


# A hundred steps at noise 1 have an epsilon of 11 and more at the first rates.
LONG_SETTINGS = ((0.2, 0.5, 3.0), (0.05, 0.1, 0.7))
LONG = (
    "tasks by coins, examples",
    "tasks without replacement, examples",
    "grouped, episodes by coins",
    "grouped, classes without replacement",
    "examples by coins",
)
# At the second rates, a hundred steps of the others have an epsilon of 13.
LONG_AT_LOW_NOISE = LONG[0], LONG[2], LONG[4]


Case = tuple[str, Any, Any, int, int]
"""Name, setting, step, number of steps and number of draws of a simulation."""
Audits = dict[str, Callable[[], list[AuditRow]]]


def mechanism_cases(draws: int, long_draws: int) -> Iterator[Case]:
    """The simulations: all designs for one step, some for a hundred."""
    for setting in SETTINGS:
        for name, step in designs(*setting).items():
            yield name, setting, step, 1, draws
    for setting, names in zip(LONG_SETTINGS, (LONG, LONG_AT_LOW_NOISE), strict=True):
        for name in names:
            yield name, setting, designs(*setting)[name], 100, long_draws


def epoch_cases(draws: int) -> Iterator[Case]:
    """The simulations of designs by epochs, one and one and a half; a tenth if long."""
    for setting in SETTINGS:
        epoch = round(1 / setting[0])
        number = draws if epoch < 10 else draws // 10
        for name, step in epoch_designs(*setting).items():
            for steps in (epoch, epoch + epoch // 2):
                yield name, setting, step, steps, number


def simulations(cases: Iterable[Case]) -> Audits:
    """The simulations by name; designs with the same tables are the same one."""
    known: dict[Any, MechanismAudit] = {}

    def audit(name: str, step: Any, steps: int, number: int) -> list[AuditRow]:
        tables = [
            (*table, count)
            for make in (worst_case, dominating_branches)
            for table, count in tables_of_run(make, step, steps)
        ]
        key = tuple(np.asarray(f).tobytes() for table in tables for f in table)
        if key not in known:
            total = total_draws(step, number)
            with ProgressBar(Console(stderr=True), "draws", total) as progress:
                known[key] = audit_mechanism(
                    step,
                    delta=DELTA,
                    num_steps=steps,
                    num_draws=number,
                    on_draws=progress.advance,
                )
        return mechanism_rows(name, known[key])

    audits: Audits = {}
    for name, setting, step, steps, number in cases:
        rates = f"{setting[0]:g}, {setting[1]:g}, {step.noise_multiplier:g}"
        name = f"{name} ({rates}), T={steps}"
        audits[name] = partial(audit, name, step, steps, number)
    return audits
