"""What a test of a peer says of our accountant that was put in the place of theirs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from dp_accounting import UnsupportedEventError, dp_event

from experiments.peers import stand_ins
from experiments.peers.stand_ins import Asked, Relation, TheirPld

# An answer may be above the peer's by its own rounding, and below the value that the
# peer's finer grids tend to by this, both relative.
_ABOVE, _BELOW = 1e-6, 1e-4
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
    """Orders at which their series fails and they say inf: ours against mpmath."""
    import mpmath

    for order in (1.1, 1.5, 2.5, 7.3):
        with mpmath.workdps(30):
            q, s, a = mpmath.mpf("0.1"), mpmath.mpf(1), mpmath.mpf(order)

            def integrand(x, q=q, s=s, a=a):
                ratio = 1 - q + q * mpmath.exp((2 * x - 1) / (2 * s**2))
                return mpmath.npdf(x, 0, s) * ratio**a

            moment = mpmath.quad(integrand, [-40, -10, 0, 2, 5, 10, 20, 60])
            truth = float(mpmath.log(moment) / (a - 1))
        ours = float(stand_ins.sampled_rdp(0.1, 1.0, [order])[0])
        assert abs(ours / truth - 1) < 1e-9, (order, ours, truth)


def covers_laplace_under_replacement() -> None:
    """A changed record moves the sum by two norms: theirs at half the noise."""
    ours = stand_ins.EpisodicAccountant(Relation.REPLACE_ONE)
    ours.compose(dp_event.LaplaceDpEvent(1.0))
    half = TheirPld().compose(dp_event.LaplaceDpEvent(0.5))
    for delta in (1e-2, 1e-6):
        bound = half.get_epsilon(delta)
        assert 0.999 * bound <= ours.get_epsilon(delta) <= bound * (1 + 1e-6)


def loses_nothing_but_rounding() -> None:
    """The rate of an attacker who learns nothing, rounded up."""
    nothing = stand_ins.PldStandIn()
    nothing.compose(dp_event.NoOpDpEvent())
    assert 0 <= nothing.get_true_positive_rates(0.5) - 0.5 <= 1e-15


NAMED: dict[str, tuple[str, str, Callable[[], None]]] = {
    r"composition_errors_for_neighboring_relation1$": (
        "tighter",
        "covers more: Laplace noise under REPLACE_ONE",
        covers_laplace_under_replacement,
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
    r"test_log_a_frac_early_termination": (
        "tighter",
        "finite where their series does not converge",
        converges_where_theirs_gives_up,
    ),
}
