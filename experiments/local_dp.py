"""Counting ones with a curator, without one, and with a shuffler.

``python experiments/local_dp.py --out results/local_dp``.

Root-mean-square error of the count at one epsilon, by simulation (markers, 2,000
trials, up to 10^7 users) and by formula (lines). ``n`` users hold a bit each:

* *Central*: the sum plus Laplace noise of scale ``1 / eps``.
* *Local*: everybody answers by randomized response; the number ``Y`` of ones answered
  gives the unbiased ``(Y - n p) / (q - p)``.
* *Shuffled*: the local answers, at the larger local epsilon that shuffling brings back
  to ``eps``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from drawing import new_figure, path_option, save, write_table

from jaxdp_episodic.bounds import shuffled_epsilon

EPSILON, DELTA, TRIALS, SHARE_OF_ONES = 1.0, 1e-8, 2_000, 0.3
USERS = 10 ** np.arange(2, 8)
# Local epsilon above which shuffling is not asked for: its answers are all but true.
LARGEST_LOCAL_EPSILON = 30.0
# Halvings of the range of local epsilons, on a logarithmic scale.
BISECTIONS = 18
LOOKS = {
    "local": ("#D55E00", "--", "s"),
    "shuffled": ("#0072B2", "-.", "^"),
    "central": ("#000000", "-", "o"),
}


def central_sum_error(epsilon: Any) -> Any:
    """Standard deviation of the central sum under ``replace_one``: ``sqrt(2) / eps``.

    In bits; *exact*, ``inf`` at epsilon 0.
    """
    with np.errstate(divide="ignore"):
        return (np.sqrt(2.0) / np.asarray(epsilon, np.float64))[()]


def local_sum_error(local_epsilon: Any, *, num_users: Any) -> Any:
    """Standard deviation of the local sum: ``sqrt(n) / (2 sinh(eps / 2))``.

    The variance of an answer, ``q p = 1/4 - ...``, over ``(q - p)²``; the same for all
    data. In bits; *exact*, ``inf`` at epsilon 0.
    """
    eps, n = np.asarray(local_epsilon, np.float64), np.asarray(num_users)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return np.where(n > 0, np.sqrt(n) * (0.5 / np.sinh(eps / 2)), 0.0)[()]


def simulate_sums(
    *,
    num_ones: int,
    num_users: int,
    epsilon: float,
    model: str,
    num_trials: int,
    seed: int,
) -> np.ndarray:
    """(num_trials,) unbiased estimates of the number of ones in independent trials.

    ``model`` is "central" (epsilon of the sum) or "local" (epsilon of every user).
    """
    rng = np.random.default_rng(seed)
    if model == "central":
        return num_ones + rng.laplace(scale=1 / epsilon, size=num_trials)
    truth, lie = 1 / (1 + np.exp(-epsilon)), np.exp(-epsilon) / (1 + np.exp(-epsilon))
    zeros = num_users - num_ones
    answers = rng.binomial(num_ones, truth, num_trials)
    answers = answers + rng.binomial(zeros, lie, num_trials)
    return (answers - num_users * lie) / np.tanh(epsilon / 2)


def local_epsilon_for_shuffled(
    epsilon: Any, *, num_users: Any, delta: Any, kind: str = "randomized_response"
) -> Any:
    """Largest local epsilon that shuffling brings down to ``epsilon`` at ``delta``.

    Found by bisection: the *upper bound* of ``kind`` was seen to stay within
    ``epsilon`` (> 0). At least epsilon, at most 30, within 1e-4 relative.
    """
    eps, n, small = np.broadcast_arrays(
        np.asarray(epsilon, np.float64), np.asarray(num_users), delta
    )
    low, high = (
        np.minimum(eps, LARGEST_LOCAL_EPSILON),
        np.full(eps.shape, LARGEST_LOCAL_EPSILON),
    )
    for _ in range(BISECTIONS):
        middle = np.sqrt(low * high)
        found = shuffled_epsilon(middle, num_users=n, delta=small, kind=kind)
        fits = np.asarray(found) <= eps
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return low[()]


def simulated(model: str, epsilons: np.ndarray) -> np.ndarray:
    """Root-mean-square error at every number of users."""
    errors = []
    for i, (n, epsilon) in enumerate(zip(USERS, epsilons, strict=True)):
        ones = int(SHARE_OF_ONES * n)
        sums = simulate_sums(
            num_ones=ones,
            num_users=int(n),
            epsilon=float(epsilon),
            model=model,
            num_trials=TRIALS,
            seed=i,
        )
        errors.append(np.sqrt(np.mean((sums - ones) ** 2)))
    return np.array(errors)


def draw(
    formula: dict[str, np.ndarray],
    measured: dict[str, np.ndarray],
    local: np.ndarray,
    path: Path,
) -> None:
    """Writes the picture: errors, and the local epsilon that shuffling allows."""
    figure, (left, right) = new_figure(2, size=(10.5, 4.4), width_ratios=(1.25, 1))
    for name, (color, line, marker) in LOOKS.items():
        style = {"color": color, "linestyle": line, "marker": marker}
        left.plot(USERS, formula[name], color=color, linestyle=line)
        left.plot(
            USERS,
            measured[name],
            color=color,
            marker=marker,
            linestyle="none",
            markerfacecolor="white",
            markersize=6,
        )
        left.plot([], [], label=name, markerfacecolor="white", **style)
    left.set(
        title=f"Error of a count at epsilon = {EPSILON:g}",
        xscale="log",
        yscale="log",
        ylim=(0.5, 1e4),
        xlabel="users n",
        ylabel="root-mean-square error (users)",
    )
    left.legend(frameon=False, loc="upper left")
    right.plot(
        USERS, local, color=LOOKS["shuffled"][0], marker="^", markerfacecolor="white"
    )
    right.axhline(EPSILON, color="0.5", linewidth=1)
    right.annotate(
        "not shuffled",
        (USERS[-1], EPSILON),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        color="0.3",
    )
    right.set(
        title=f"Local epsilon that shuffles to {EPSILON:g}, delta = {DELTA:g}",
        xscale="log",
        ylim=(0, 14),
        xlabel="users n",
        ylabel="local epsilon (nats)",
    )
    save(figure, path)


def main() -> None:
    """Prints and writes the table, draws the picture."""
    folder = path_option(__doc__, "--out", "results/local_dp")
    local = np.asarray(
        local_epsilon_for_shuffled(EPSILON, num_users=USERS, delta=DELTA)
    )
    same = np.full(USERS.shape, EPSILON)
    formula = {
        "local": local_sum_error(EPSILON, num_users=USERS),
        "shuffled": local_sum_error(local, num_users=USERS),
        "central": np.full(USERS.shape, central_sum_error(EPSILON)),
    }
    measured = {
        "local": simulated("local", same),
        "shuffled": simulated("local", local),
        "central": simulated("central", same),
    }
    draw(formula, measured, local, folder / "local_dp.png")
    table = {
        "epsilon": EPSILON,
        "delta of the shuffler": DELTA,
        "users": USERS.tolist(),
        "local epsilon under the shuffler": np.round(local, 6).tolist(),
        "error": {k: np.round(v, 4).tolist() for k, v in formula.items()},
        "simulated error": {k: np.round(v, 4).tolist() for k, v in measured.items()},
    }
    write_table(table, folder / "local_dp.json")
    print(f"{'users':>12}" + "".join(f"{k + ' (simulated)':>24}" for k in LOOKS))
    for i, n in enumerate(USERS):
        cells = (f"{formula[k][i]:12.2f} ({measured[k][i]:9.2f})" for k in LOOKS)
        print(f"{n:12,}" + "".join(f"{c:>24}" for c in cells))
    print(f"Written to {folder}")


if __name__ == "__main__":
    main()
