"""What a test of a peer says of our accountant that was put in the place of theirs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
from dp_accounting import UnsupportedEventError, dp_event

import jaxdp_episodic as jde
from experiments.peers import stand_ins
from experiments.peers.stand_ins import Asked, Relation, TheirPld

# An answer may be above the peer's by its own rounding, and below the value that the
# peer's finer grids tend to by this, both relative.
_ABOVE, _BELOW = 1e-6, 1e-4
# Some events are of versions after 0.6.
_later: Any = dp_event
_MOST_CHECKED = 6  # of the last questions of a search


def verdict(name: str, error: BaseException | None) -> tuple[str, str]:
    """Returns (outcome, why): "passed", "tighter", "not expressible" or "failed"."""
    if error is None:
        return "passed", ""
    if isinstance(error, UnsupportedEventError | NotImplementedError):
        return "not expressible", first_line(error)
    for pattern, (outcome, why, check) in NAMED.items():
        if re.search(pattern, name):
            try:
                check()
            except Exception as broken:
                return "failed", f"{why}: {type(broken).__name__} {first_line(broken)}"
            return outcome, why
    if isinstance(error, AssertionError) and stand_ins.ASKED:
        try:
            return compared(stand_ins.ASKED[-_MOST_CHECKED:], error)
        except Exception as broken:
            why = f"{type(broken).__name__} {first_line(broken)} of their accountant"
            return "failed", f"{first_line(error)}; not compared: {why}"
    return "failed", f"{type(error).__name__}: {first_line(error)}"


def compared(asked: list[Asked], error: BaseException) -> tuple[str, str]:
    """Whether the answers are those that the peer's own tend to on finer grids."""
    smaller = ""
    for one in asked:
        theirs = one.theirs(False)
        finer = min(theirs, one.theirs(True))
        most = theirs * (1 + _ABOVE) + 1e-12
        least = finer - (theirs - finer) - _BELOW * finer - 1e-12
        said = f"ours {one.ours:.7g}, theirs {theirs:.7g}, on a finer grid {finer:.7g}"
        if math.isnan(one.ours) or not least <= one.ours <= most:
            return "failed", f"{said}; {first_line(error)}"
        if one.ours < theirs * (1 - 1e-12):
            smaller = said
    if smaller:
        return "tighter", smaller
    return "failed", f"equal answers; {first_line(error)}"


def first_line(error: BaseException) -> str:
    """What an error says first."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:200] if lines else type(error).__name__


# --- Tests whose outcome needs a check of its own ---


def covers_poisson_under_replacement() -> None:
    """``supports`` says yes where theirs says no: checked against their other one."""
    event = dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(1.0))
    bound = TheirPld(Relation.REPLACE_ONE).compose(event, 10).get_epsilon(1e-6)
    ours = stand_ins.EpisodicAccountant(Relation.REPLACE_ONE).compose(event, 10)
    assert 0.999 * bound <= ours.get_epsilon(1e-6) <= bound


def converges_where_theirs_gives_up() -> None:
    """Orders at which their series fails, and they say inf or more: against mpmath."""
    for rate, noise, order in (
        (0.1, 1.0, 1.1),
        (0.1, 1.0, 2.5),
        (0.1, 1.0, 7.3),
        (0.01, 2.5, 1.5),
        (0.01, 2.5, 2.5),
        (0.01, 2.5, 5.0),
    ):
        ours = float(stand_ins.sampled_rdp(rate, noise, [order])[0])
        assert abs(ours / sampled_rdp(rate, noise, order) - 1) < 1e-9, order


def sampled_rdp(rate: float, noise: float, order: float) -> float:
    """The Rényi divergence of a sampled Gaussian by its definition, 30 digits."""
    with mpmath.workdps(30):
        q, s, a = mpmath.mpf(rate), mpmath.mpf(noise), mpmath.mpf(order)

        def integrand(x):
            ratio = 1 - q + q * mpmath.exp((2 * x - 1) / (2 * s**2))
            return mpmath.npdf(x, 0, s) * ratio**a

        edges = [s * edge for edge in (-40, -10, -3, 0, 3, 6, 10, 20, 60)]
        return float(mpmath.log(mpmath.quad(integrand, edges)) / (a - 1))


def repeats_at_finer_orders() -> None:
    """Theorem 6 of arXiv:2110.03620 at finer orders than theirs: never above ours."""
    for noise, mean in ((1000.0, 1000.0), (0.001, 1000.0), (0.001, 1.0)):
        event = dp_event.RepeatAndSelectDpEvent(
            dp_event.GaussianDpEvent(noise), mean, math.inf
        )
        ours = stand_ins.RdpStandIn()
        ours.compose(event)
        orders = np.asarray(ours.orders)
        fine = np.unique([*np.geomspace(1.0001, 1e7, 20_000), *orders[1:]])
        values = np.array([repeated_gaussian_rdp(noise, mean, a) for a in fine])
        for order, value in zip(orders, ours.rdp, strict=True):
            assert value >= values[fine >= order].min() * (1 - 1e-3), order


def repeated_gaussian_rdp(noise: float, mean: float, order: float) -> float:
    """The theorem, without what the event of no run adds."""
    epsilon = math.log1p(1 / (order - 1))
    x, y = (math.sqrt(0.5) * (epsilon * noise + s * 0.5 / noise) for s in (-1, 1))
    delta = math.erfc(x) / 2 - math.exp(epsilon) * math.erfc(y) / 2
    return order / (2 * noise**2) + mean * delta + math.log(mean) / (order - 1)


def repeats_pure_dp_at_larger_orders() -> None:
    """A Rényi divergence grows with its order: theirs at a larger one is no less."""
    event = dp_event.RepeatAndSelectDpEvent(dp_event.LaplaceDpEvent(0.1), 10, math.inf)
    orders = [1 + 1 / math.expm1(10.0), 1e10, 1e100]
    ours = stand_ins.RdpStandIn(orders)
    ours.compose(event)
    with stand_ins.their_functions():
        theirs = stand_ins.TheirRdp(orders).compose(event)._rdp
    assert ours.rdp[0] <= ours.rdp[1] <= theirs[1] * (1 + 1e-9)
    assert ours.rdp[0] >= 10.0  # one run alone, at the largest order


def counts_the_event_of_no_run() -> None:
    """Ours is theirs and what a Poisson number of 0 adds to the moment, no more."""
    for epsilon, mean in ((1.0, 1.0), (0.1, 2.0)):
        order = 1 + 1 / math.expm1(epsilon)
        event = dp_event.RepeatAndSelectDpEvent(
            dp_event.LaplaceDpEvent(1 / epsilon), mean, math.inf
        )
        orders = [order, 1e10, 1e100]
        ours = stand_ins.RdpStandIn(orders)
        ours.compose(event)
        with stand_ins.their_functions():
            theirs = float(stand_ins.TheirRdp(orders).compose(event)._rdp[0])
        moment = math.exp((order - 1) * theirs) + math.exp(-mean)
        assert theirs <= ours.rdp[0] <= math.log(moment) / (order - 1) * (1 + 1e-6)


def is_right_to_the_last_digit() -> None:
    """The mean of a truncated negative binomial at gamma 1e-7, 30 digits."""
    with mpmath.workdps(30):
        for shape in (0.01, 0.5, 0.99, 1.0, 2.0, 10.0):
            g, k = mpmath.mpf(1e-7), mpmath.mpf(shape)
            truth = float(k * (1 / g - 1) / (1 - g**k))
            assert abs(stand_ins.trials_mean(1e-7, shape) / truth - 1) < 1e-14


def covers_laplace_under_replacement() -> None:
    """A changed record moves the sum by two norms: theirs at half the noise."""
    for once, halved in (
        (dp_event.LaplaceDpEvent(1.0), dp_event.LaplaceDpEvent(0.5)),
        (
            dp_event.DiscreteLaplaceDpEvent(0.1, 1),
            dp_event.DiscreteLaplaceDpEvent(0.1, 2),
        ),
    ):
        ours = stand_ins.EpisodicAccountant(Relation.REPLACE_ONE).compose(once)
        half = TheirPld().compose(halved)
        for delta in (1e-2, 1e-6):
            bound = half.get_epsilon(delta)
            assert 0.999 * bound <= ours.get_epsilon(delta) <= bound * (1 + 1e-6)


def takes_it_for_any_pure_mechanism() -> None:
    """Of epsilon-DP alone no other pair is known: theirs of less is never above it."""
    claim = _later.EpsilonDeltaDpEvent(1.0, 0.0)
    for event in (
        _later.PermuteAndFlipDpEvent(1.0),
        _later.ExponentialMechanismDpEvent(1.0),
    ):
        for relation in Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE:
            ours = stand_ins.EpisodicAccountant(relation).compose(event, 3)
            pure = TheirPld(relation).compose(claim, 3)
            for delta in (1e-2, 1e-5):
                bound = pure.get_epsilon(delta)
                assert 0.999 * bound <= ours.get_epsilon(delta) <= bound * (1 + 1e-6)
        with stand_ins.their_functions():
            orders = [1.5, 2.0]
            theirs = stand_ins.TheirRdp(orders).compose(event).rdp
        ours = stand_ins.RdpStandIn(orders).compose(event)
        assert np.all(theirs <= ours.rdp * (1 + 1e-9)) and np.all(ours.rdp <= 1.0)


def rounds_pure_dp_up() -> None:
    """Two claims that add up to epsilon 3: theirs to twelve digits, never less."""
    for failures, lost in (((0.0, 0.0), 0.0), ((0.1, 0.2), 0.28)):
        ours = stand_ins.PldStandIn()
        for epsilon, failure in zip((1.0, 2.0), failures, strict=True):
            ours.compose(_later.EpsilonDeltaDpEvent(epsilon, failure))
        assert lost <= ours.get_delta(3.0) <= lost + 4e-12
        assert 3.0 <= ours.get_epsilon(lost) * (1 + 1e-15) <= 3.0 + 4e-12
        expected = 0.91938 if lost else 0.8286
        assert abs(ours.get_true_positive_rates(0.1) - expected) <= 1e-3
        assert abs(ours.get_gdp_parameter_estimate() - 2.358) <= 1e-3 or lost
        assert math.isinf(ours.get_gdp_parameter_estimate()) or not lost


def loses_nothing_but_rounding() -> None:
    """The rate of an attacker who learns nothing, rounded up."""
    nothing = stand_ins.PldStandIn()
    nothing.compose(dp_event.NoOpDpEvent())
    assert 0 <= nothing.get_true_positive_rates(0.5) - 0.5 <= 1e-15


def covers_every_small_data_set() -> None:
    """A cut Poisson sample of at most four records, told apart by enumeration.

    And where a batch is hardly ever cut theirs is not below ours.
    """
    event = dp_event.TruncatedSubsampledGaussianDpEvent(50_000, 0.02048, 1152, 4.0)
    theirs = TheirPld().compose(event, 10_000).get_epsilon(1e-5)
    ours = stand_ins.EpisodicAccountant().compose(event, 10_000).get_epsilon(1e-5)
    assert 0.999 * theirs < ours <= theirs
    rate, batch, noise = 0.4, 2, 0.8
    for relation in ("add_remove", "zero_out"):
        release = jde.TruncatedPoissonRelease(
            noise,
            sampling_probability=rate,
            batch_size=batch,
            population=3 if relation == "add_remove" else 4,
            neighboring_relation=relation,
        )
        for epsilon in (0.3, 1.5):
            bound = jde.delta(release, num_steps=1, epsilon=epsilon)
            for values in itertools.product((-1.0, 0.0, 1.0), repeat=4):
                other = values[1:] if relation == "add_remove" else (0.0, *values[1:])
                dists = [_distribution_of_sums(v, rate, batch) for v in (values, other)]
                for top, bottom in (dists, dists[::-1]):
                    assert _hockey_stick(top, bottom, noise, epsilon) <= bound + 1e-9


def _distribution_of_sums(
    values: tuple[float, ...], rate: float, batch: int
) -> dict[float, float]:
    dist: dict[float, float] = {}
    for mask in itertools.product((False, True), repeat=len(values)):
        drawn = list(itertools.compress(values, mask))
        chance = rate ** len(drawn) * (1 - rate) ** (len(values) - len(drawn))
        kept = list(itertools.combinations(drawn, min(batch, len(drawn))))
        for subset in kept:
            dist[sum(subset)] = dist.get(sum(subset), 0.0) + chance / len(kept)
    return dist


def _hockey_stick(
    top: dict[float, float], bottom: dict[float, float], noise: float, epsilon: float
) -> float:
    x = np.linspace(-12.0, 12.0, 4_001)

    def density(dist: dict[float, float]) -> np.ndarray:
        parts = [w * np.exp(-((x - m) ** 2) / (2 * noise**2)) for m, w in dist.items()]
        return np.sum(parts, axis=0) / (noise * math.sqrt(2 * math.pi))

    above = np.maximum(density(top) - math.exp(epsilon) * density(bottom), 0.0)
    return float(above.sum() * (x[1] - x[0]))


NAMED: dict[str, tuple[str, str, Callable[[], None]]] = {
    r"MaxBatchSizeTest.test_compute_epsilon_via_pld|test_truncated_subsampled|"
    r"CalibrateTest.test_calibrate_(noise|num_updates|batch_size)_truncated$": (
        "tighter",
        "another theorem for cut samples (docs/proofs.md), checked by enumeration",
        covers_every_small_data_set,
    ),
    r"composition_errors_for_neighboring_relation[13]$": (
        "tighter",
        "covers more: (discrete) Laplace noise under REPLACE_ONE",
        covers_laplace_under_replacement,
    ),
    r"composition_errors_for_neighboring_relation5$": (
        "tighter",
        "covers more: permute-and-flip under REPLACE_ONE, as any epsilon-DP mechanism",
        takes_it_for_any_pure_mechanism,
    ),
    r"test_permute_and_flip_matches_laplace|rdp_exponential_mechanism": (
        "not expressible",
        "more than epsilon-DP of permute-and-flip and the exponential mechanism",
        takes_it_for_any_pure_mechanism,
    ),
    r"test_epsilon_basic|test_epsilon_delta_basic|test_exponential_mechanism_basic": (
        "passed",
        "3.000000000003 for 3: an upper bound, rounded up",
        rounds_pure_dp_up,
    ),
    r"test_poisson_subsampling_with_zero_probability": (
        "passed",
        "an upper bound is rounded up: 0.5000000000000004 for 0.5",
        loses_nothing_but_rounding,
    ),
    r"RdpPrivacyAccountantTest\.test_supports$": (
        "tighter",
        "covers more: Poisson sampling under REPLACE_ONE",
        covers_poisson_under_replacement,
    ),
    r"test_log_a_frac_early_termination|test_compute_rdp_poisson_sampled_gaussian": (
        "tighter",
        "right, by mpmath, where their series does not converge",
        converges_where_theirs_gives_up,
    ),
    r"test_repeat_and_select_gaussian_poisson": (
        "tighter",
        "the smallest of the larger orders, on a finer grid of them",
        repeats_at_finer_orders,
    ),
    r"test_repeat_and_select_pure_poisson_mean10$": (
        "tighter",
        "the bound of a larger order is one, and smaller",
        repeats_pure_dp_at_larger_orders,
    ),
    r"test_repeat_and_select_pure_poisson_mean(1|2)$": (
        "not expressible",
        "a Poisson number of runs without what the event of no run adds to the moment",
        counts_the_event_of_no_run,
    ),
    r"test_truncated_negative_binomial_mean2_1e-7": (
        "passed",
        "99999990.00000007 for 99999990.0: the last digit of a float",
        is_right_to_the_last_digit,
    ),
}
