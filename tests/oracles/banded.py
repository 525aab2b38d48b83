"""Runs with correlated noise, enumerated: all draws, releases row by row.

Nothing of the library is used. A world is the law of the draws of all steps, and each
contribution given the earlier releases. Rows are released as the theory says, with
crashes and rows that are given up. The likelihood of a release is the sum over all
draws. Deltas follow by enumeration, if releases are whole numbers, or by simulation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Draw = tuple[str, ...]
"""Names of the contributions to one step."""
Law = dict[Draw, float]
Runs = dict[tuple[Draw, ...], float]
"""Chances of what all steps draw."""
GOES_ON, RESTARTS, GIVES_UP = 0, 1, 2


def never(t: int, y: np.ndarray) -> np.ndarray:
    """No crash."""
    return np.zeros(len(y), int)


def at(**events: Sequence[int]) -> Callable[[int, np.ndarray], np.ndarray]:
    """Restarts before these rows, and gives these rows up."""

    def crash(t: int, y: np.ndarray) -> np.ndarray:
        event = RESTARTS if t in events.get("restarts", ()) else GOES_ON
        return np.full(len(y), GIVES_UP if t in events.get("lost", ()) else event)

    return crash


def by_releases(level: float) -> Callable[[int, np.ndarray], np.ndarray]:
    """Restarts after a release above the level, gives up after one far below it."""

    def crash(t: int, y: np.ndarray) -> np.ndarray:
        last = y[:, t - 1].sum(1) if t else np.zeros(len(y))
        return np.select([last > level, last < -2 * level], [RESTARTS, GIVES_UP], 0)

    return crash


class Mechanism(NamedTuple):
    """What is released of the sums: ``y_t = sum_i c_i x_{t-i} + deviation z_t``."""

    coefficients: np.ndarray  # (b,), or (b, d) where entries have their own
    deviation: np.ndarray | float  # or one for each row
    crash: Callable[[int, np.ndarray], np.ndarray] = never


class World(NamedTuple):
    """The law of the draws, and values ``f(t, y)`` of shape (n, d) by name."""

    runs: Runs
    values: Mapping[str, Callable[[int, np.ndarray], np.ndarray | float]]


# --- Draws ---


def poisson(units: Sequence[str], rate: float) -> Law:
    """Each unit independently with this probability."""
    law: Law = {}
    for kept in itertools.product((False, True), repeat=len(units)):
        draw = tuple(u for u, keep in zip(units, kept, strict=True) if keep)
        law[draw] = math.prod(rate if keep else 1 - rate for keep in kept)
    return law


def independent(laws: Sequence[Law]) -> Runs:
    """Steps that draw with fresh bits."""
    return {
        tuple(draw for draw, _ in path): math.prod(p for _, p in path)
        for path in itertools.product(*(law.items() for law in laws))
        if all(p > 0 for _, p in path)
    }


def allocated(groups: Sequence[int], units: Mapping[str, int], epoch: int) -> Runs:
    """Each unit in one step of each epoch of its group."""
    choices = []
    for name, group in units.items():
        steps = [t for t, of in enumerate(groups) if of == group]
        number = math.ceil(len(steps) / epoch)
        bins = itertools.product(range(epoch), repeat=number)
        choices.append([(name, steps, chosen) for chosen in bins])
    runs: Runs = {}
    for chosen in itertools.product(*choices):
        drawn: list[list[str]] = [[] for _ in groups]
        for name, steps, places in chosen:
            for i, t in enumerate(steps):
                if places[i // epoch] == i % epoch:
                    drawn[t].append(name)
        path = tuple(tuple(d) for d in drawn)
        share = math.prod(1 / len(c) for c in choices)
        runs[path] = runs.get(path, 0.0) + share
    return runs


# --- Releases ---


def _rows(
    mechanism: Mechanism, world: World, path: tuple[Draw, ...], y: np.ndarray
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each row's mean, and whether it is released; ``y`` is known up to it."""
    n, _, d = y.shape
    coefficients = np.asarray(mechanism.coefficients, float)
    if coefficients.ndim == 1:
        coefficients = coefficients[:, None]
    first = np.zeros(n, int)  # the oldest sum in memory
    memory: list[np.ndarray] = []
    for t, draw in enumerate(path):
        event = mechanism.crash(t, y)
        first = np.where(event == RESTARTS, t, first)
        values = (world.values[name](t, y) for name in draw)
        memory.append(sum(values, np.zeros((n, d))))
        mean = np.zeros((n, d))
        for i, c in enumerate(coefficients[: t + 1]):
            mean += (first <= t - i)[:, None] * c * memory[t - i]
        yield t, mean, event != GIVES_UP
        first = np.where(event == GIVES_UP, t + 1, first)


def _deviations(mechanism: Mechanism, steps: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(mechanism.deviation, float), (steps,))


def sampled(
    mechanism: Mechanism,
    world: World,
    number: int,
    rng: np.random.Generator,
    d: int = 1,
) -> np.ndarray:
    """(number, T, d) releases; 0 stands for a row that was given up."""
    paths = list(world.runs)
    counts = rng.multinomial(number, list(world.runs.values()))
    steps = len(paths[0])
    parts = []
    for path, count in zip(paths, counts, strict=True):
        y = np.zeros((count, steps, d))
        noise = rng.normal(size=y.shape) * _deviations(mechanism, steps)[:, None]
        for t, mean, released in _rows(mechanism, world, path, y):
            y[:, t] = np.where(released[:, None], mean + noise[:, t], 0.0)
        parts.append(y)
    return np.concatenate(parts)


def density(mechanism: Mechanism, world: World, y: np.ndarray) -> np.ndarray:
    """(n,) of the releases, over all draws."""
    total = np.zeros(len(y))
    scales = _deviations(mechanism, y.shape[1])
    normalizer = np.log(scales * math.sqrt(2 * math.pi))
    for path, chance in world.runs.items():
        exponent = np.full(len(y), math.log(chance))
        for t, mean, released in _rows(mechanism, world, path, y):
            z = (y[:, t] - mean) / scales[t]
            normal = -0.5 * (z * z).sum(1) - y.shape[2] * normalizer[t]
            if not released.all():
                lost = np.where((y[:, t] == 0).all(1), 0.0, -np.inf)
                normal = np.where(released, normal, lost)
            exponent += normal
        total += np.exp(exponent)
    return total


class Deltas(NamedTuple):
    """Of epsilons, forward and backward: (2, E)."""

    values: np.ndarray
    errors: np.ndarray  # standard errors, or mass that was not enumerated


def simulated(
    mechanism: Mechanism,
    worlds: tuple[World, World],
    epsilons: Sequence[float],
    number: int,
    rng: np.random.Generator,
    d: int = 1,
) -> Deltas:
    """The mean of ``(1 - exp(epsilon - loss))_+`` over releases of each world."""
    gains = []
    for here, there in (worlds, worlds[::-1]):
        y = sampled(mechanism, here, number, rng, d)
        ratio = density(mechanism, there, y) / density(mechanism, here, y)
        gains.append([np.maximum(1 - math.exp(e) * ratio, 0.0) for e in epsilons])
    values = np.array(gains)
    return Deltas(values.mean(2), values.std(2) / math.sqrt(number))


def enumerated(
    mechanism: Mechanism,
    worlds: tuple[World, World],
    epsilons: Sequence[float],
    shift: float,
) -> Deltas:
    """Sums over all whole releases, one entry a row, whose means are at most ``shift``.

    The noise is discrete Gaussian. Its variance is at least 16, so its normalizing sum
    is the integral, and the density at whole numbers is its probability.
    """
    steps = len(next(iter(worlds[0].runs)))
    scale = float(_deviations(mechanism, 1)[0])
    assert scale >= 4
    reach = math.ceil(5.5 * scale + shift)
    axis = np.arange(-reach, reach + 1, dtype=float)
    totals, mass = np.zeros((2, len(epsilons))), np.zeros(2)
    for part in np.array_split(axis, math.ceil(len(axis) ** steps / 2e5)):  # of row 0
        grid = np.meshgrid(part, *[axis] * (steps - 1), indexing="ij")
        y = np.stack([rows.ravel() for rows in grid], axis=1)[:, :, None]
        p, q = (density(mechanism, w, y) for w in worlds)
        mass += p.sum(), q.sum()
        for j, g in enumerate(np.exp(epsilons)):
            totals[:, j] += (
                np.maximum(p - g * q, 0).sum(),
                np.maximum(q - g * p, 0).sum(),
            )
    return Deltas(totals, np.broadcast_to(1 - mass[:, None], totals.shape))
