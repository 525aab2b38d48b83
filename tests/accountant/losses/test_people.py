"""People in many clip units, against 40-digit integrals of the definition.

And against values of composed steps that were computed by other programs, and checked
there against dp-accounting's connect-the-dots and simulation.
"""

import mpmath as mp
import numpy as np
import pytest
from scipy.stats import binom

from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    ReplacedMixtureLoss,
    ZeroedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.mixture_halves import log_rest
from jaxdp_episodic.accountant.losses.people import (
    PeopleLoss,
    ReplacedPeopleLoss,
    log_add,
)
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule, Quadrature
from jaxdp_episodic.accountant.methods.certified.method import pld_bounds
from jaxdp_episodic.accountant.methods.exact.method import exact_answer
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt, Run
from jaxdp_episodic.accountant.questions.worst_path import answer
from oracles import precise
from rows import fast_and_slow

FINE = MomentRule("forward", Quadrature(32, 16))
KINDS = (PeopleLoss, ReplacedPeopleLoss)
ROWS = (ZeroedGaussianLoss, AntipodalGaussianLoss)


def people(kind, q, e, s, counts, weights):
    """The loss of one setting; components below 1e-20 are left out."""
    chances = np.broadcast_to(q, len(counts))
    columns = [
        (np.array([float(n)]), np.log([w]), log_rest(np.array([chance])))
        for n, w, chance in zip(counts, weights, chances, strict=True)
        if w > 1e-20
    ]
    parts = zip(*columns, strict=True)
    return kind(np.ones(1), *(np.array([a]) for a in (e, s)), *parts)


def frames(kind, m, p, r, s):
    """m Poisson-sampled units of rate p, each holding the person with probability r."""
    n = np.arange(m + 1)
    weights = binom.pmf(m - n, m, p * (1 - r))
    return people(kind, p * r / (1 - p + p * r), 1.0, s, n, weights)


def exchanged(kind, p, law, s):
    """Units of rate p; |R| has the law, and the replacement is hidden."""
    law = np.asarray(law)
    rate = 1.0 if law[0] == 0 else law[1:].sum()
    return people(kind, p, rate, s, np.arange(1, len(law)), law[1:])


SETTINGS = {
    "frames": (frames, 5, 0.1, 0.3, 0.7),
    "frames, rare": (frames, 4, 1e-4, 1e-3, 1.0),
    "coins": (people, 0.3, 1.0, 1e-4, [6], [1.0]),
    "exchanged": (exchanged, 0.8, binom.pmf(range(5), 4, 0.2), 0.6),
    "drawn surely": (exchanged, 1.0, binom.pmf(range(4), 3, 0.3), 0.5),
    "unequal": (people, [0.0, 0.3, 1.0, 0.5], 0.8, 0.6, [1, 2, 2, 5], [0.2] * 4),
    "nothing hidden": (people, 1.0, 1.0, 0.4, [0, 1, 3], [0.5, 0.3, 0.2]),
}


def definition(loss, u, *, backward):
    """``H_g`` and ``g Q(L > u)`` of the visible counts' mixtures; 50 digits."""
    e, s = (mp.mpf(float(a[0])) for a in (loss.cover_rate, loss.shift))
    total = [mp.mpf(0), mp.mpf(0)]
    columns = loss.counts, loss.log_weights, loss.log_rests
    for count, w, rest in zip(*columns, strict=True):
        n, own = int(count[0]), -mp.expm1(mp.mpf(float(rest[0])))
        law = [mp.binomial(n, j) * own**j * (1 - own) ** (n - j) for j in range(n + 1)]
        covered, shown = (
            [(rate * b, sign * j * s) for j, b in enumerate(law)]
            for rate, sign in ((e, 1), (1 - e, -1))
        )
        nobody = [(w, -m) for w, m in covered] if loss.is_symmetric else [(e, 0)]
        pair = covered + shown, nobody + shown
        if backward:  # here the other contributions lie on the person's side
            mirrored = [(w, -m) for w, m in shown]
            pair = precise.mirrored(covered + mirrored, nobody + mirrored)
        found = precise.mp_tails(*pair, u)
        weight = mp.exp(mp.mpf(float(w[0]))) / e
        total = [a + weight * b for a, b in zip(total, found, strict=True)]
    return total


def test_log_add_is_continuous_across_equal_real_parts():
    second = np.append(np.array([-1e-12, 0.0, 1e-12]) + 3j, 0.7 + 2j)
    found = log_add(0.0, second)
    assert np.ptp(found[:3].real) < 1e-9 and np.ptp(found[:3].imag) < 1e-9
    np.testing.assert_allclose(found[3], np.log(1 + np.exp(second[3])), rtol=1e-15)


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_profiles_of_both_directions(kind, name):
    make, *given = SETTINGS[name]
    loss, points = make(kind, *given), np.array([0.0, 1e-6, 0.05, 0.7, 6.0])
    with np.errstate(all="ignore"):
        both = loss.log_tails(points)
    for backward, found in enumerate(both[: 2 - loss.is_symmetric]):
        for u, *values in zip(points, *found, strict=True):
            with mp.workdps(50):
                truth = definition(loss, mp.mpf(float(u)), backward=bool(backward))
                if truth[0] < 1e-250:
                    assert max(values) < -500
                    continue
                logs = [float(mp.log(part)) for part in truth]
            off = 5e-15 * (1 + abs(logs[0]))
            off += 4e-15 * np.exp(logs[1] - logs[0])  # the displacement of u
            assert abs(values[0] - logs[0]) < off
            assert abs(values[1] - logs[1]) < 1e-10


RARE = [(PeopleLoss, 0.0144, 2.31, 38, 964.0), (PeopleLoss, 0.7, 2.0, 60, -3.0)]


@pytest.mark.parametrize("kind, q, s, count, u", [*RARE, (KINDS[1], *RARE[0][1:])])
def test_a_count_without_density_at_a_loss(kind, q, s, count, u):
    """Some counts' Gaussians have no density at the loss, but weight beyond it."""
    loss, backward = people(kind, q, 1.0, s, [count], [1.0]), u < 0
    with np.errstate(all="ignore"):
        found = loss.log_tails(np.array([abs(u)]))[backward]
    with mp.workdps(60):
        truth = definition(loss, mp.mpf(abs(u)), backward=backward)
        logs = np.array([float(mp.log(part)) for part in truth])
    off = np.abs(np.concatenate(found) - logs)
    assert np.all(off < loss.profile_error()[0] * (1 + np.abs(logs).sum()))


@pytest.mark.parametrize("kind, row", [*zip(KINDS, ROWS, strict=True)])
@pytest.mark.parametrize(
    "p, r, s", [(0.25, 1.0, 0.5), (1.0, 0.3, 1.0), (0.9, 0.6, 3.0)]
)
def test_one_unit_is_the_row_of_an_example(kind, row, p, r, s):
    loss, same = (
        exchanged(kind, p, [1 - r, r], s),
        row(*np.array([[1.0], [p], [r], [s]])),
    )
    t = np.array([0.1, 1.0, 5.0, 60.0])

    def excess(loss, direction):
        wide = loss.map(lambda a: np.broadcast_to(a, t.shape))
        return wide.log_excess(t, FINE._replace(direction=direction))[0]

    with np.errstate(all="ignore"):
        u = np.array([0.0, 1e-9, 0.3, 2.0])
        for ours, theirs in zip(loss.log_tails(u), same.log_tails(u), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-14, atol=2e-14)
        for direction in ("forward", "backward"):
            np.testing.assert_allclose(
                excess(loss, direction), excess(same, direction), rtol=1e-12, atol=1e-10
            )
    question, counts = EpsilonAt(np.log([1e-6])), (np.array([40.0]),)
    ours, theirs = (
        exact_answer(question, Run((one,), counts)).value for one in (loss, same)
    )
    # Both integration paths have an error of at most 1e-6.
    np.testing.assert_allclose(ours, theirs, rtol=1e-8)


def unit(coin, q, s, counts, weights):
    """Replaced contributions of a Poisson-sampled unit, and the law of their number."""
    j = np.arange(max(counts) + 1)
    law = coin * sum(
        w * binom.pmf(j, n, q) for n, w in zip(counts, weights, strict=True)
    )
    rate, (shifts, logs) = law[1:].sum(), (s * j[1:, None], np.log(law[1:, None]))
    logs = tuple(logs - np.log(rate))
    return ReplacedMixtureLoss(np.ones(1), np.array([rate]), tuple(shifts), logs), law


UNITS = [(0.05, 0.2, 0.5, [8], [1.0]), (0.3, 0.5, 0.6, [2, 5], [0.4, 0.6])]


@pytest.mark.parametrize("setting", [*UNITS, (1.0, 0.3, 0.7, [4], [1.0])])
def test_a_hidden_coin_is_in_the_mixtures(setting):
    (coin, _, s, *_), (loss, law) = setting, unit(*setting)
    for u in (0.0, 0.1, 1.0, 3.0):
        sides = [(c, s * j) for j, c in enumerate(law)]
        p, q = ([(1 - coin, 0), *((c, k * m) for c, m in sides)] for k in (1, -1))
        expected = float(precise.mp_tails(p, q, u)[0])
        with np.errstate(all="ignore"):
            ((found, _), _) = loss.log_tails(np.array([u]))
        assert np.exp(found[0]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("setting", "steps"),
    fast_and_slow([(UNITS[1], 10.0), (UNITS[0], 500.0)], lambda _, n: n == 10.0),
)
def test_steps_with_a_hidden_coin_are_within_certified_ends(setting, steps):
    """Zeros of these mixtures' moments may lie close to the real axis."""
    question = EpsilonAt(np.log([1e-5]))
    run = Run((unit(*setting)[0],), (np.array([steps]),))
    low, high = pld_bounds(question, run)
    answer = exact_answer(question, run, certify=False)
    assert low - 1e-9 <= answer.value <= high + 1e-9
    assert high < 1.001 * low and answer.error < 1e-6 * answer.value


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_its_settings(kind):
    one, other = frames(kind, 5, 0.1, 0.3, 0.7), frames(kind, 5, 0.2, 0.4, 0.5)
    both = kind.stack([one.kept_in_range(), other.kept_in_range()])
    both = both.map(lambda a: a.reshape(-1))
    counts = np.array([50.0, 20.0])
    question = DeltaAt(np.array([2.0, 3.0]))
    found = exact_answer(question, Run((both,), (counts,)), certify=False).value
    for i, loss in enumerate((one, other)):
        run = Run((loss,), (counts[i : i + 1],))
        alone = exact_answer(DeltaAt(question.target[i : i + 1]), run, certify=False)
        assert found[i] == pytest.approx(alone.value[0], rel=1e-9)


def test_no_units_lose_nothing():
    nobody = people(PeopleLoss, 0.3, 1.0, np.inf, [0], [1.0])
    assert nobody.loses_nothing.all() and not np.isnan(nobody.log_kept()).any()
    assert frames(PeopleLoss, 5, 0.0, 0.3, 0.5).loses_nothing.all()
    assert people(ReplacedPeopleLoss, 0.3, 1.0, np.inf, [3], [1.0]).is_unprotected.all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [50.0, 1e30, 1e100])
def test_with_little_noise_any_contribution_is_evident(kind, shift):
    run = Run((frames(kind, 5, 0.8, 0.3, shift),), (np.ones(1),))
    question = DeltaAt(np.ones(1))
    found = answer(question, (run.with_axis(),), "exact").value
    seen = 1 - (1 - 0.8 * 0.3) ** 5
    assert np.exp(found) == pytest.approx(seen, rel=1e-9)


def test_forward_is_the_larger_profile_at_every_loss():
    """docs/proofs.md, "Moments": otherwise a bound by its moment would be too small."""
    rng = np.random.default_rng(0)
    for _ in range(15):
        number = rng.integers(1, 4)
        counts = np.sort(rng.integers(1, 12, number))
        cover = rng.choice([1.0, rng.uniform(0.01, 1)])
        weights = rng.dirichlet(np.ones(number)) * cover
        shift = rng.choice([0.02, 0.3, 1.5, 4.0])
        loss = people(PeopleLoss, rng.uniform(0.001, 1), cover, shift, counts, weights)
        u = np.append(0.0, np.geomspace(1e-4, 30, 40))
        with np.errstate(all="ignore"):
            (forward, _), (backward, _) = loss.log_tails(u)
            moments = [
                loss.log_excess(np.ones(1), FINE._replace(direction=d))[0]
                for d in ("forward", "backward")
            ]
        assert np.all(backward <= forward + 1e-12 * (1 + np.abs(forward)))
        assert moments[1] <= moments[0] + 1e-10


def test_large_shifts_get_enough_nodes():
    loss = exchanged(PeopleLoss, 0.8, binom.pmf(range(13), 12, 0.5), 2.5)
    question, run = EpsilonAt(np.log([1e-5])), Run((loss,), (np.array([10.0]),))
    found = exact_answer(question, run, certify=False)
    assert found.error < 1e-10 * found.value
