"""Which number of bands of correlated noise leaves the least noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    CLASS,
    EPISODE,
    GroupedClasses,
    PeopleBlocks,
    Poisson,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import (
    Bands,
    GaussianStep,
    banded,
    grouped_levels,
)
from jaxdp_episodic.accountant.numerics.band_coefficients import (
    band_coefficients,
    band_error,
)
from jaxdp_episodic.accountant.questions.budget import plan_budget
from jaxdp_episodic.accountant.questions.calibration import calibrate_noise_multiplier

# Numbers of bands to try; the noise changes little between neighbours.
_COUNTS = (2, 3, 4, 5, 8, 10, 15, 20, 25, 50)


@dataclass(frozen=True)
class BandChoices:
    """The answer of `choose_bands`; the first row is independent noise.

    Attributes:
      steps: (n,) the steps, with their bands, sampling probabilities and noise.
      bands: (n,) number of bands.
      levels: (n,) the level whose units are grouped; "" for independent noise.
      noise_multiplier: (n,) the one that meets the target.
      relative_noise: (n,) standard deviation of the noise in what the optimizer
        remembers, relative to independent noise.
      jitter: (n,) the same for a single step.
      horizon: number of steps that the optimizer remembers.
    """

    steps: tuple[GaussianStep, ...]
    bands: np.ndarray
    levels: tuple[str, ...]
    noise_multiplier: np.ndarray
    relative_noise: np.ndarray
    jitter: np.ndarray
    horizon: float

    @property
    def chosen(self) -> int:
        """The index of the least relative noise; among equals, of the fewest bands."""
        return int(np.argmin(self.relative_noise))

    @property
    def step(self) -> GaussianStep:
        """The chosen step."""
        return self.steps[self.chosen]

    def __str__(self) -> str:
        names = ("noise_multiplier", "relative_noise", "jitter")
        width = max(map(len, ("groups", *self.levels)))
        lines = ["  ".join(("bands", "groups".rjust(width), *names))]
        for i, level in enumerate(self.levels):
            bands = f"{'*' * (i == self.chosen)}{self.bands[i]}".rjust(5)
            numbers = (f"{getattr(self, n)[i]:.4g}".rjust(len(n)) for n in names)
            lines.append("  ".join((bands, (level or "-").rjust(width), *numbers)))
        told = f"* least noise over {self.horizon:g} steps, relative to independent"
        return "\n".join([*lines, told])


def choose_bands(
    step: GaussianStep,
    *,
    epsilon: Any,
    delta: Any,
    num_steps: Any,
    horizon: float = 30.0,
    level: str | None = None,
    restarts: int = 0,
    before: Sequence[tuple[GaussianStep, float]] = (),
) -> BandChoices:
    """Returns the noise of each number of bands at one privacy target; see `Bands`.

    Each candidate samples as many units a step as ``step`` does: with b bands a Poisson
    probability of the grouped level is b times as large, and an epoch b times as short.
    Candidates with too small groups are left out. Only public numbers are used. The
    noise of every row meets the target; which row trains best is an *estimate*, since
    it also depends on the optimizer.

    Args:
      step: the step with independent noise, one setting; its noise is ignored.
      epsilon: target, > 0 and finite, nats.
      delta: in (0, 1].
      num_steps: whole number >= 1, fixed in advance.
      horizon: number of steps that the optimizer remembers, >= 1; inf for plain sums,
        which is too optimistic with curvature or weight decay.
      level: the level to be grouped; None tries every level that has a theorem.
      restarts: expected number of crashes and resumes, >= 0. Each empties the memory of
        the noise, which costs bands accuracy and independent noise nothing.
      before: private statistics that the run starts with, and their shares of the
        budget, as of `plan_budget`.

    Raises:
      ValueError: a step with bands or arrays, or a number out of range.
      NotImplementedError: a level that has no theorem.
    """
    if not isinstance(step, GaussianStep) or step.shape or step.bands is not None:
        shown = _validation.shown(step)
        raise ValueError(
            f"step must be a GaussianStep of one setting without bands, got {shown}"
        )
    steps = _validation.whole_number("num_steps", num_steps)
    breaks = _validation.whole_number("restarts", restarts, minimum=0)
    Bands(1, level="", horizon=horizon)  # checks the horizon
    candidates = [(step, 1.0)]
    covered = grouped_levels(step.design, str(step.privacy_unit))
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        _validation.single(name, np.asarray(value))
    if level is not None and level not in covered:
        banded(step, Bands(2, level=level, horizon=horizon))  # refused by name
    for name in covered if level is None else (level,):
        for count in (count for count in _COUNTS if count <= steps):
            bands = Bands(count, level=name, horizon=horizon)
            try:
                made = _of_as_many_units(step, bands)
            except NotImplementedError:
                if level is not None:
                    raise
                break
            if made is not None:
                candidates.append(made)
    target: Any = {"epsilon": epsilon, "delta": delta, "num_steps": steps}
    found = []
    for made, lost in candidates:
        if before:
            noise = plan_budget(made, before=before, **target).step.noise_multiplier
        else:
            noise = calibrate_noise_multiplier(made, **target)
        made = dataclasses.replace(made, noise_multiplier=float(noise))
        count, name = (made.bands.count, made.bands.level) if made.bands else (1, "")
        kernel = band_coefficients(count, steps, horizon)
        errors = [band_error(kernel, steps, memory, breaks) for memory in (horizon, 1)]
        found.append((made, count, name, noise, *(noise * lost * e for e in errors)))
    steps_made, counts, levels, *columns = zip(*found, strict=True)
    noises, slow, fast = map(np.array, columns)
    return BandChoices(
        steps=steps_made,
        bands=np.array(counts),
        levels=levels,
        noise_multiplier=noises,
        relative_noise=slow / slow[0],
        jitter=fast / fast[0],
        horizon=float(horizon),
    )


def _of_as_many_units(
    step: GaussianStep, bands: Bands
) -> tuple[GaussianStep, float] | None:
    """Returns the step with bands, and by what factor it draws fewer units.

    None if it is impossible: a probability above 1, an epoch that ``bands.count`` does
    not divide, or a group that is too small.
    """
    design: Any = step.design
    grouped = isinstance(design, GroupedClasses) and bands.level == CLASS
    in_episodes = isinstance(design, PeopleBlocks) or (grouped and design.episodes)
    name = EPISODE if in_episodes else bands.level
    scheme: Any = next(one for one in design.schemes if one.name == name)
    if isinstance(scheme, Poisson):
        rate = float(np.asarray(scheme.sampling_probability)) * bands.count
        if rate > 1:
            return None
        scheme = dataclasses.replace(scheme, sampling_probability=rate)
    elif not isinstance(scheme, WithoutReplacement):
        length, rest = divmod(int(scheme.steps_per_epoch), bands.count)
        if rest or length < int(np.asarray(scheme.times)):
            return None
        scheme = dataclasses.replace(scheme, steps_per_epoch=length)
    try:
        made = dataclasses.replace(
            step, sampling=design.with_scheme(scheme), bands=bands
        )
    except ValueError:  # a group is too small
        return None
    if in_episodes and not isinstance(scheme, WithoutReplacement):
        group: Any = made.in_group.design
        kept = group.num_possible_episodes * bands.count
        return made, float(design.num_possible_episodes / kept)
    return made, 1.0
