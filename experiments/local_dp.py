"""Counting ones with a curator, without one, and with a shuffler.

``python experiments/local_dp.py --out results/local_dp``.

Root-mean-square error of the count at one epsilon, by simulation (markers, 2,000
trials, up to 10^7 users) and by formula (lines).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from drawing import new_figure, path_option, save, write_table

from jaxdp_episodic.accountant.bounds.local_dp import (
    central_sum_error,
    local_epsilon_for_shuffled,
    local_sum_error,
    simulate_sums,
)

EPSILON, DELTA, TRIALS, SHARE_OF_ONES = 1.0, 1e-8, 2_000, 0.3
USERS = 10 ** np.arange(2, 8)
LOOKS = {
    "local": ("#D55E00", "--", "s"),
    "shuffled": ("#0072B2", "-.", "^"),
    "central": ("#000000", "-", "o"),
}


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
