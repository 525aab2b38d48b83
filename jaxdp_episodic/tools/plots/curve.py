"""The privacy curve of a run, as a picture and as a JSON file of its numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.step import AnyStep
from jaxdp_episodic.accountant.questions import gdp
from jaxdp_episodic.accountant.questions.api import METHODS, epsilon
from jaxdp_episodic.accountant.report.sentences import upward
from jaxdp_episodic.files import json_file
from jaxdp_episodic.tools.plots import figures

SMALLEST_DELTA = 1e-12  # the curve ends here, and mu describes it down to here
# Denser towards both ends.
_FALSE_POSITIVE_RATES = np.concatenate(
    [np.geomspace(1e-6, 0.1, 101), 1 - 0.9 * np.geomspace(1, 1e-3, 61)[1:], [1.0]]
)
_NUM_EPSILONS = 51  # points of each curve
# Lines differ in dashes and lightness, for readers without colour.
_STYLES: dict[str, dict[str, Any]] = {
    "exact": {"color": "#000000", "ls": "-", "lw": 1.8},
    "pld": {"color": "#56b4e9", "ls": (0, (6, 2)), "lw": 1.6},
    "rdp": {"color": figures.VERMILION, "ls": (0, (4, 1.5, 1, 1.5)), "lw": 1.6},
}


class PrivacyCurve(NamedTuple):
    """The numbers in the picture: *upper bounds*, as certain as their method."""

    method: str  # of everything except ``delta``
    epsilon: np.ndarray  # (K,) nats, from 0 to where delta is about ``smallest_delta``
    delta: dict[str, np.ndarray]  # method -> (K,)
    false_positive_rate: np.ndarray  # (A,)
    true_positive_rate: np.ndarray  # (A,) the largest that an attacker reaches
    advantage: float  # the largest true positive rate minus false positive rate
    gdp_mu: float  # see `gdp_mu`
    smallest_delta: float  # mu describes the curve down to here


def plot_curve(
    step: AnyStep,
    path: str | Path,
    *,
    num_steps: Any = None,
    method: str = "exact",
) -> PrivacyCurve:
    """Draws a run's privacy curve and attacks; returns the numbers."""
    path = figures.check_suffix(path, "--out")
    figure = figures.new_figure(10.0, 4.4)
    path.parent.mkdir(parents=True, exist_ok=True)  # before the long computation
    curve = privacy_curve(step, num_steps=num_steps, method=method)
    figure.get_layout_engine().set(wspace=0.06)
    left, right = figure.subplots(1, 2)
    _draw_delta(left, curve)
    _draw_rates(right, curve)
    figures.plain(left, right)
    figures.save(figure, path)
    document = json_file.plain({"version": 1, **curve._asdict()})
    text = json.dumps(document, indent=1, allow_nan=False)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    return curve


def privacy_curve(
    step: AnyStep,
    *,
    num_steps: Any = None,
    method: str = "exact",
    methods: Sequence[str] = METHODS,
) -> PrivacyCurve:
    """Returns the numbers of `plot_curve`, with delta by each of ``methods``."""
    run: dict[str, Any] = {"num_steps": num_steps}
    gain = gdp.advantage(step, method=method, **run)
    if np.ndim(gain):
        raise ValueError(
            "every field of the step, and num_steps, must be a scalar for a curve, got "
            f"fields of shape {np.shape(gain)}"
        )
    end = float(epsilon(step, delta=SMALLEST_DELTA, method=method, **run))
    epsilons = np.linspace(0, end if 0 < end < math.inf else 1.0, _NUM_EPSILONS)
    rates = gdp.true_positive_rate(
        step, false_positive_rate=_FALSE_POSITIVE_RATES, method=method, **run
    )
    mu = gdp.gdp_mu(step, method=method, smallest_delta=SMALLEST_DELTA, **run)
    deltas = {
        name: np.asarray(gdp.upper_delta(step, epsilon=epsilons, method=name, **run))
        for name in methods
    }
    return PrivacyCurve(
        method=method,
        epsilon=epsilons,
        delta=deltas,
        false_positive_rate=_FALSE_POSITIVE_RATES,
        true_positive_rate=np.asarray(rates),
        advantage=float(gain),
        gdp_mu=float(mu),
        smallest_delta=SMALLEST_DELTA,
    )


def summary(curve: PrivacyCurve) -> dict[str, str]:
    """Returns the most important numbers as text, rounded up."""
    facts = {"advantage": f"at most {upward(curve.advantage, 3)}"}
    for rate in (0.001, 0.01, 0.1):
        nearest = np.argmin(np.abs(curve.false_positive_rate - rate))
        reached = upward(curve.true_positive_rate[nearest], 3)
        facts[f"true positives at {rate:g}"] = f"at most {reached}"
    facts["Gaussian mu"] = (
        f"{upward(curve.gdp_mu, 3)} (delta above {curve.smallest_delta:g})"
    )
    return facts | {"method": curve.method}


def _draw_delta(axes: Any, curve: PrivacyCurve) -> None:
    """Draws delta against epsilon, one line per method."""
    for method, deltas in curve.delta.items():
        drawn = np.where(deltas > 0, deltas, np.nan)
        axes.plot(curve.epsilon, drawn, label=method, **_STYLES[method])
    limits = {"ylim": (curve.smallest_delta, 2.0), "xlim": (0, curve.epsilon[-1])}
    labels = {"xlabel": "epsilon (nats)", "ylabel": "delta (probability), upper bound"}
    axes.set(yscale="log", **limits, **labels)
    axes.set_title("Privacy curve", fontsize=11)
    if curve.advantage == 0:
        figures.note(axes, "nothing is revealed: delta is 0", inset=0.04, size=10)
    else:
        axes.legend(title="method", frameon=False, loc="upper right")


def _draw_rates(axes: Any, curve: PrivacyCurve) -> None:
    """Draws the true against the false positive rate, on logarithmic axes."""
    alpha, mu = curve.false_positive_rate, upward(curve.gdp_mu, 3)
    largest = f"largest possible ({curve.method})"
    axes.plot(alpha, curve.true_positive_rate, label=largest, **_STYLES["exact"])
    if 0 < curve.gdp_mu < math.inf:
        style: dict[str, Any] = {"color": figures.BLUE, "ls": (0, (6, 2)), "lw": 1.3}
        normal = NormalDist()  # the best test between N(0, 1) and N(mu, 1)
        inside = (normal.inv_cdf(a) + curve.gdp_mu for a in alpha[:-1].tolist())
        rates = [*map(normal.cdf, inside), 1.0]
        axes.plot(alpha, rates, label=f"Gaussian of mu = {mu}", **style)
    style = {"color": "#777777", "ls": figures.DOTTED, "lw": 1.5}
    axes.plot(alpha, alpha, label="guessing", **style)
    axes.set(xscale="log", yscale="log", xlim=(1e-6, 1.0), ylim=(1e-6, 1.3))
    axes.set_xlabel("false positive rate of the attacker")
    axes.set_ylabel("true positive rate of the attacker")
    axes.set_title("Membership attack", fontsize=11)
    axes.legend(frameon=False, loc="lower right")
    text = f"advantage at most {upward(curve.advantage, 3)}\nmu = {mu}"
    text += f"  (delta above {curve.smallest_delta:g})"
    figures.note(axes, text, inset=0.04, size=10)
