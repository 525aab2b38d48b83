"""Composition of a Poisson-subsampled Gaussian: every accounting there is, compared.

The two settings of the poster of Zhu and Wang (2019): noise 5 and noise 1, sampling
probability 1e-3, epsilon at delta = 1e-8 against the number of steps up to 10^6:
``python experiments/poisson_rdp.py --out results/poisson_rdp``.

Naive and strong composition know two numbers of a step, the RDP bounds a curve; "exact"
is the privacy of the whole run. The lower bound is one of the RDP, not of epsilon: no
RDP bound for all mechanisms does better, an exact accounting may. The table ends with
how the RDP of one step grows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from drawing import draw_curve, new_figure, path_option, save, write_table

import jaxdp_episodic as jde
from jaxdp_episodic.bounds import (
    Gaussian,
    Laplace,
    Mechanism,
    RandomizedResponse,
    compose_naive,
    compose_optimal_epsilon,
    delta_poisson_subsampled,
    rdp_poisson_subsampled,
    smallest_epsilon,
)

RATE, DELTA, NOISES = 1e-3, 1e-8, (5.0, 1.0)
STEPS = np.unique(np.rint(10 ** np.linspace(0, 6, 25)).astype(int))
ORDERS = np.unique(np.rint(10 ** np.linspace(np.log10(2), 3.3, 120)))
# Colour, dashes and marker of every curve, in the order of the legend.
LOOKS = {
    "naive composition": ("#999999", ":", "x"),
    "strong composition, optimal": ("#E69F00", "--", "^"),
    "RDP, general bound": ("#D55E00", "-.", "s"),
    "RDP, tight bound": ("#0072B2", "-", "o"),
    "RDP, lower bound": ("#56B4E9", ":", "v"),
    "exact": ("#000000", "-", ""),
}


def step_epsilon(noise: float, step_delta: np.ndarray) -> np.ndarray:
    """Epsilon of one sampled step at its share of delta."""

    def log_delta(epsilon: np.ndarray, index: np.ndarray) -> np.ndarray:
        del index
        value = delta_poisson_subsampled(
            Gaussian(noise), sampling_probability=RATE, epsilon=epsilon
        )
        with np.errstate(divide="ignore"):
            return np.log(value)

    # At epsilon 60 a step of this noise has no delta left that float64 can show.
    return smallest_epsilon(
        log_delta, np.log(step_delta), np.full(step_delta.shape, 60.0)
    )


def rdp_epsilon(noise: float, bound: str) -> np.ndarray:
    """Epsilon of the run by the RDP of a step, at the best whole order."""
    curve = rdp_poisson_subsampled(
        Gaussian(noise), sampling_probability=RATE, orders=ORDERS, bound=bound
    )
    t = ORDERS - 1
    at_order = STEPS[:, None] * curve + np.log1p(-1 / ORDERS)
    at_order -= (np.log(DELTA) + np.log(ORDERS)) / t
    return np.maximum(at_order.min(axis=1), 0.0)


def curves(noise: float) -> dict[str, np.ndarray]:
    """Epsilon of every accounting at ``STEPS``."""
    single, half = step_epsilon(noise, DELTA / STEPS), DELTA / 2 / STEPS
    naive, _ = compose_naive(single, DELTA / STEPS, num_steps=STEPS)
    strong = compose_optimal_epsilon(
        step_epsilon(noise, half), half, num_steps=STEPS, total_delta=DELTA
    )
    step = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=RATE), noise_multiplier=noise
    )
    exact = jde.epsilon(step, num_steps=STEPS, delta=DELTA, method="exact")
    return {
        "naive composition": naive,
        "strong composition, optimal": strong,
        "RDP, general bound": rdp_epsilon(noise, "general"),
        "RDP, tight bound": rdp_epsilon(noise, "tight"),
        "RDP, lower bound": rdp_epsilon(noise, "lower"),
        "exact": np.asarray(exact),
    }


def growth() -> list[dict]:
    """RDP of a step over ``alpha rate² rdp(2)``, for three mechanisms."""
    mechanisms: dict[str, Mechanism] = {
        "Gaussian, noise 5": Gaussian(5.0),
        "Laplace, scale 2": Laplace(2.0),
        "randomized response, epsilon 1": RandomizedResponse(1.0),
    }
    rows = []
    for name, mechanism in mechanisms.items():
        for order in (2, 4, 16, 64):
            row: dict = {"mechanism": name, "order": order}
            scale = order * RATE**2 * mechanism.rdp(2.0)
            for bound in ("general", "tight", "lower"):
                value = rdp_poisson_subsampled(
                    mechanism, sampling_probability=RATE, orders=order, bound=bound
                )
                row[bound] = float(value / scale)
            rows.append(row)
    return rows


def draw(found: dict[float, dict[str, np.ndarray]], path: Path) -> None:
    """Writes the picture: one panel a noise."""
    figure, panels = new_figure(2, size=(10.5, 4.6), sharey=True)
    for axes, (noise, values) in zip(panels, found.items(), strict=True):
        for name, look in LOOKS.items():
            style = {"markersize": 5, "markevery": 3, "label": name}
            width = 2.2 if name == "exact" else 1.5
            draw_curve(axes, STEPS, values[name], look, linewidth=width, **style)
        axes.set(
            title=f"noise multiplier {noise:g}, sampling probability {RATE:g}",
            xscale="log",
            yscale="log",
            ylim=(3e-4, 300),
            xlabel="steps",
        )
    panels[0].set_ylabel(f"epsilon (nats) at delta = {DELTA:g}")
    panels[0].legend(loc="upper left", frameon=False, fontsize=9.5)
    save(figure, path)


def main() -> None:
    """Prints and writes the table, draws the picture."""
    folder = path_option(__doc__, "--out", "results/poisson_rdp")
    found = {noise: curves(noise) for noise in NOISES}
    draw(found, folder / "poisson_rdp.png")
    table = {
        "about": f"epsilon at delta {DELTA:g}, sampling probability {RATE:g}",
        "steps": STEPS.tolist(),
        "epsilon": {
            f"noise {noise:g}": {k: np.round(v, 9).tolist() for k, v in values.items()}
            for noise, values in found.items()
        },
        "rdp over alpha rate^2 rdp(2)": growth(),
    }
    write_table(table, folder / "poisson_rdp.json")
    for noise, values in found.items():
        print(f"\nnoise {noise:g}")
        for name, curve in values.items():
            cells = (f"{curve[STEPS == k].item():10.4f}" for k in (1, 1_000, 10**6))
            print(f"  {name:30}" + "".join(cells))
    print(f"\n1, 1,000 and 1,000,000 steps. Written to {folder}")


if __name__ == "__main__":
    main()
