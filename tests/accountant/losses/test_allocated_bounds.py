"""Certified ends of random allocation: distributions in convex order, composed."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses import allocation_tables
from jaxdp_episodic.accountant.losses.allocated_bounds import (
    AllocatedBoundingLoss,
    epoch_distribution,
)
from jaxdp_episodic.accountant.losses.allocated_gaussian import AllocatedGaussianLoss
from jaxdp_episodic.accountant.numerics import lognormal_sums
from jaxdp_episodic.accountant.numerics.lognormal_sums import axis_of, contours
from jaxdp_episodic.accountant.numerics.lognormal_terms import Sums
from jaxdp_episodic.accountant.numerics.quadrature import chebyshev_points
from oracles import allocation

ROWS = json.loads((Path(__file__).parents[2] / "allocation.json").read_text())["rows"]


def step(steps, noise, relation="add_remove"):
    drawn = jde.RandomAllocation("unit", steps_per_epoch=steps)
    return jde.GaussianStep(
        drawn, noise_multiplier=noise, neighboring_relation=relation
    )


def dist(shift, bins, taken, above):
    return AllocatedBoundingLoss(*map(np.asarray, (1.0, shift, bins, taken, above)))


def test_tails_are_sums_over_the_distribution():
    found = epoch_distribution(1.0, 8.0, 5.0, 1.0)
    masses = {"forward": found.with_unit, "backward": found.with_unit}
    masses["backward"] = found.with_unit * np.exp(-found.loss)
    u = np.array([0.0, 0.01, 0.3, 0.9, 2.0])
    every = dist(1.0, 8.0, 5.0, 1.0).log_tails(u)
    for sign, (direction, mass), (profile, tail) in zip(
        (1, -1), masses.items(), every, strict=True
    ):
        loss = sign * found.loss
        above = loss > u[:, None]
        gap = np.minimum(u[:, None] - loss, 0.0)
        expected = np.where(above, -np.expm1(gap), 0.0) @ mass
        assert np.exp(profile) == pytest.approx(expected, rel=1e-12, abs=1e-300)
        expected = np.where(above, np.exp(gap), 0.0) @ mass
        assert np.exp(tail) == pytest.approx(expected, rel=1e-12), direction
    beyond = dist(1.0, 8.0, 5.0, 1.0).log_tails(np.array([80.0]))
    assert all(np.isneginf(tail[0]) for pair in beyond for tail in pair)


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(
    ("steps", "taken", "shift", "epsilon"),
    [
        (2, 2, 0.2, 0.3),
        (7, 2, 1.0, 0.2),
        (4, 2, 3.0, 0.6),
        pytest.param(3, 3, 0.7, 0.9, marks=pytest.mark.slow),
        pytest.param(12, 3, 1.4, 0.1, marks=pytest.mark.slow),
    ],
)
def test_a_few_steps_by_definition(steps, taken, shift, epsilon, direction):
    truth = allocation.add_remove(steps, taken, shift, epsilon, direction)
    low, high = (
        float(np.exp(dist(shift, steps, taken, above).log_tails(np.array([epsilon]))
        [direction == "add"][0][0]))
        for above in (0.0, 1.0)
    )  # fmt: skip
    assert low < truth < high < low * 1.003


def test_intervals_hold_the_reference_and_are_narrow():
    for row in ROWS[8:9]:
        steps, noise, epochs, direction, epsilon, delta = row
        asked = {"num_steps": steps * epochs}
        low, high = jde.delta_interval(step(steps, noise), epsilon=epsilon, **asked)
        assert delta <= high
        if direction == "remove":
            assert low <= delta
            low, high = jde.epsilon_interval(step(steps, noise), delta=delta, **asked)
            assert low <= epsilon <= high < low + 1e-4 * max(1, epsilon)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row[:5])))
def test_every_reference_value_is_held(row):
    steps, noise, epochs, direction, epsilon, delta = row
    asked = {"num_steps": steps * epochs}
    low, high = jde.delta_interval(step(steps, noise), epsilon=epsilon, **asked)
    assert delta <= high < low * 1.006
    assert low <= delta or direction == "add"
    value, info = jde.delta(
        step(steps, noise), epsilon=epsilon, return_info=True, **asked
    )
    # Either exact, to a relative 1e-6, or the certified end, or Rényi's bound below it.
    assert low <= value <= high
    if info.is_certified_bound:
        bound = jde.delta(step(steps, noise), epsilon=epsilon, method="rdp", **asked)
        assert delta <= value and value == min(high, bound)
    if direction == "remove":
        low, high = jde.epsilon_interval(step(steps, noise), delta=delta, **asked)
        assert low <= epsilon <= high < low + 1e-4 * max(1, epsilon)


@pytest.mark.slow
def test_composed_with_another_mechanism():
    """Two steps of an epoch and one Gaussian release: by integrals."""
    shift, other, epsilon = 1.0, 0.8, 1.0
    nodes, weights = np.polynomial.legendre.leggauss(160)
    y, weights = 10 * nodes, 10 * weights
    # Given the release's loss l the epoch is asked at epsilon - l.
    truth = 0.0
    for place, weight in zip(y + other, weights * norm.pdf(y), strict=True):
        left = epsilon - (other * place - other**2 / 2)
        truth += weight * allocation.add_remove(2, 2, shift, left, "remove")
    release = jde.GaussianStep(
        jde.Poisson("unit", sampling_probability=1.0), noise_multiplier=1 / other
    )
    run = jde.compose((step(2, 1 / shift), 2), (release, 1))
    low, high = jde.delta_interval(run, epsilon=epsilon)
    assert low <= truth <= high < low * 1.003


def test_a_table_that_leaves_the_certified_ends_is_not_used(monkeypatch):
    """A planted table, 1 % too small everywhere, is answered for by the upper end."""
    honest = allocation_tables._made

    def too_small(*asked, **how):
        tables = honest(*asked, **how)
        return [table._replace(values=table.values - 0.01) for table in tables]

    asked = {"epsilon": 0.9, "num_steps": 6}
    low, high = jde.delta_interval(step(6, 1.21), **asked)
    allocation_tables.forget_tables()
    monkeypatch.setattr(allocation_tables, "_made", too_small)
    value, info = jde.delta(step(6, 1.21), return_info=True, **asked)
    allocation_tables.forget_tables()
    assert info.is_certified_bound
    assert value == high > low


def planted_at(table, *, off, first, rows):
    values = table.values.copy()
    values[:, first:] += off * np.array(rows)[:, None, None]
    return table._replace(values=values)


def vouched(rising, falling, count, shift):
    """Next to tables that are as they should be, and are vouched for."""
    high, low = made(9, 0.8)
    how = np.array([count, 9.0]), np.array([shift, 0.8])
    others = allocation_tables._checked_tables([high], [low], *(row[1:] for row in how))
    both = allocation_tables._checked_tables([rising, high], [falling, low], *how)
    assert both[1][0].error == others[0][0].error < 1e-9
    return both[0]


def made(count, shift):
    terms = Sums(np.full(2, float(count)), np.full(2, shift), np.array([1.0, 0.0]))
    return allocation_tables._made(terms)


def fitted(table, count):
    return allocation_tables._fitted([table], np.array([count]), 1.0)[0][0]


def test_tables_under_much_noise_and_of_many_steps_are_used():
    settings = [(2, 1e-3), (20, 0.06), (10**7, 0.1)]
    for pair in allocation_tables.make_sum_tables(settings):
        for table in pair:
            assert np.isfinite(table.values).all() and table.error < 1e-8


@pytest.mark.parametrize("off", [1e-4, -1e-4])
def test_tables_that_are_off_by_little_are_not_used(off):
    """1e-4 everywhere, that of another noise, and from a panel far out on."""

    def honest(shift):
        return dict(zip((True, False), made(6, shift), strict=True))

    tables = honest(1 / 1.21)

    def found(planted):
        return vouched(planted[True], planted[False], 6, 1 / 1.21)

    def kept(rows, first):
        table = planted_at(tables[True], off=off, first=first, rows=rows)
        return fitted(table, 6.0).values.shape[1]

    assert all(
        np.isfinite(one.values).all() and one.error < 1e-9 for one in found(tables)
    )
    everywhere = {
        up: planted_at(one, off=off, first=0, rows=(1, 1, 1))
        for up, one in tables.items()
    }
    for planted in (everywhere, honest((1 + off) / 1.21)):
        for one in found(planted):
            assert np.isnan(one.values).all() and one.error == 1.0
    panels = tables[True].values.shape[1]
    assert kept((0, 0, 0), 0) == panels
    for rows in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)):
        assert kept(rows, 3) == 3


def test_tables_end_at_a_jump_into_a_panel_that_reaches_far_down():
    # By what counts at its end, nothing, it was let off.
    terms = Sums(np.array([20.0]), np.array([3.0]), np.ones(1))
    (table,) = allocation_tables._made(terms)
    last = table.values.shape[1] - 1
    depth = table.values[0, last, [0, -1]] - table.values[0, 0, 0]
    assert -36 < depth[0] and depth[1] < -80
    for off, kept in ((0.0, last + 1), (1e-4, last), (-1e-4, last)):
        planted = planted_at(table, off=off, first=last, rows=(1, 1, 1))
        assert fitted(planted, 20.0).values.shape[1] == kept


def test_tables_whose_first_panel_is_off_have_no_values():
    rising, falling = made(6, 0.5)
    planted = planted_at(rising, off=0.1, first=0, rows=(1, 0, 0))
    for one in vouched(planted, falling, 6, 0.5):
        assert np.isnan(one.values).all() and one.error == 1.0


def test_tables_without_rare_jumps_are_not_used():
    """As if every contour left them out: rows fit, mass and mean are right to 1e-10."""
    rising, falling = made(50, 1.0)
    half = 0.5 * np.diff(rising.edges)[:, None]
    points = 1 + chebyshev_points(rising.values.shape[2])
    x = 50 * np.exp(rising.core * np.sinh(rising.edges[:-1, None] + half * points))
    (gain, beyond), there = np.exp(rising.values[:2]), rising.values[1] > -30
    last = np.flatnonzero(there.all(axis=1))[-1]
    x, gain, beyond = (array[: last + 1] for array in (x, gain, beyond))
    short = rising.up_to(int(last) + 1)
    values = short.values.copy()
    cut = gain[-1, -1] * (1 - 1e-3), beyond[-1, -1] * (1 - 1e-3)
    values[0] = np.log(gain - cut[0] - cut[1] * (x[-1, -1] - x))
    values[1] = np.log(beyond - cut[1])
    planted = short._replace(values=values)
    fits = fitted(planted, 50.0)
    assert fits.values.shape[1] >= last and cut[1] < 1e-10
    honest = vouched(short, falling, 50, 1.0)
    assert all(np.isfinite(one.values).all() for one in honest)
    for one in vouched(planted, falling, 50, 1.0):
        assert np.isnan(one.values).all()


def test_tables_say_how_far_they_are_off_under_little_noise():
    """Checking contours that are too far apart were off by 1e-7 themselves."""
    _, table = allocation_tables.sum_tables(82, 1 / 0.2003)
    place = table.core * np.sinh(np.linspace(0.001, 0.999, 300) * table.edges[-1])
    found = table.at(place)
    terms = Sums(np.array([82.0]), np.array([1 / 0.2003]), np.zeros(1))
    along = contours(axis_of(terms), place[-1:])
    off = np.abs(found - along.log_tails(np.zeros(300, int), place, finer=True))
    assert off[:, found[0] > found[0, 0] - 36].max() < table.error < 1e-8


@pytest.mark.parametrize(
    ("what", "planted", "count", "shift"),
    [("_KNOWN", (16, 24, 32), 50, 0.7444), ("_FALL", 22.0, 6, 0.2496)],
)
def test_what_is_known_of_rays_too_roughly_is_said(
    monkeypatch, what, planted, count, shift
):
    """Both contours once shared it: errors were 2 to 15 times what was said."""
    true, _ = allocation_tables.sum_tables(count, shift)
    apart = allocation_tables._Kept(allocation_tables._made_sums)
    monkeypatch.setattr(allocation_tables, "_sums", apart)
    monkeypatch.setattr(lognormal_sums, what, planted)
    loose, _ = allocation_tables.sum_tables(count, shift)
    place = np.linspace(0.0, 0.7, 300) * true.end
    values = true.at(place)
    off = np.abs(loose.at(place) - values)[:, values[0] > values[0, 0] - 36].max()
    assert 10 * true.error < off < loose.error


@pytest.mark.slow
def test_little_noise_is_answered_exactly_within_certified_ends():
    # Jumps were integrated with too few nodes: the table failed its own tests.
    epoch = step(30, 1 / 3)
    value, info = jde.epsilon(epoch, delta=1e-6, num_steps=30, return_info=True)
    low, high = jde.epsilon_interval(epoch, delta=1e-6, num_steps=30)
    assert not info.is_certified_bound and info.error < 1e-7
    assert low <= value <= high < low + 1e-4


def test_edges():
    none = jde.epsilon_interval(step(4, 0.0), delta=1e-6, num_steps=8)
    assert np.isposinf(none[1])
    assert jde.epsilon_interval(step(4, np.inf), delta=1e-6, num_steps=8) == (0, 0)
    assert jde.epsilon_interval(step(4, 1.0), delta=1e-6, num_steps=0) == (0, 0)
    # So much noise that the tables' shift is raised, for the upper end alone.
    low, high = jde.epsilon_interval(step(4, 1e6), delta=1e-9, num_steps=8)
    assert 0 == low <= high < 1e-3
    with pytest.raises(ValueError, match="max_width"):
        jde.epsilon_interval(step(4, 1.0), delta=1e-6, num_steps=8, max_width=1e-9)


@pytest.mark.slow
def test_both_engines_agree():
    asked = {"delta": 1e-6, "num_steps": np.array([20, 60])}
    epoch = step(20, 1.0)
    for method in ("pld", "exact"):
        values = [
            jde.epsilon(epoch, method=method, engine=engine, **asked)
            for engine in ("numpy", "jax")
        ]
        assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.parametrize(
    ("relation", "steps", "noise", "epochs", "delta"),
    [
        # Lattices finer than the losses once put the lower end up to 0.7 % down.
        ("add_remove", 341, 6.808, 8, 4e-7),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("add_remove", 9, 3.867, 5125, 5e-4),
                ("add_remove", 6438, 1.152, 9746, 7e-4),
                # D small at 1: its first cell was too wide, and the lower end 0.
                ("replace_one", 10, 1.0, 100, 1e-6),
                ("replace_one", 2510, 7.966, 1834, 1e-12),
                ("replace_one", 86431, 7.366, 267, 4e-6),
                # Little noise.
                ("replace_one", 53, 0.657, 5, 8e-10),
                ("replace_one", 10, 0.3, 10, 1e-6),
                ("replace_one", 46, 0.306, 8, 6e-9),
                ("replace_one", 116, 0.392, 435, 4e-12),
            )
        ),
    ],
)
def test_ends_of_many_epochs_are_narrow(relation, steps, noise, epochs, delta):
    asked = {"delta": delta, "num_steps": steps * epochs}
    epoch = dataclasses.replace(step(steps, noise), neighboring_relation=relation)
    value, info = jde.epsilon(epoch, return_info=True, **asked)
    low, high = jde.epsilon_interval(epoch, **asked)
    assert not info.is_certified_bound
    assert low <= value <= high < low * (1 + 1e-4)


@pytest.mark.parametrize("question", ["epsilon", "delta"])
def test_distributions_that_may_be_off_to_one_side_are_no_answer(question, monkeypatch):
    """As the nodes that check are off to either side, which averages out."""
    asked = {"delta": 1e-6} if question == "epsilon" else {"epsilon": 2.0}
    ask = functools.partial(
        getattr(jde, question), step(20, 1.0), num_steps=60, return_info=True, **asked
    )
    value, info = ask()
    assert not info.is_certified_bound
    monkeypatch.setattr(
        AllocatedGaussianLoss, "profile_error", lambda self: np.full(self.shape, 1e-5)
    )
    upper, info = ask()
    assert info.is_certified_bound and upper > value
