"""What shuffling buys: four bounds over n, local epsilon and delta.

``python experiments/shuffling.py --out results/shuffling``.

Closed form and numerical bound for any local randomizer, the bound for binary
randomized response, and a lower bound that no bound for all randomizers can beat.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from drawing import draw_curve, new_figure, path_option, save, write_table

from jaxdp_episodic.bounds import (
    shuffled_epsilon,
    shuffled_epsilon_closed_form,
)

USERS = np.rint(10 ** np.linspace(2, 9, 15)).astype(int)
LOCAL_EPSILONS = np.array([0.5, 1.0, 2.0, 4.0])
DELTAS = np.array([1e-6, 1e-8, 1e-12])
SHOWN_DELTA = 1  # index of the delta in the picture
LOOKS = {
    "closed form": ("#D55E00", ":", "s"),
    "numerical, any randomizer": ("#0072B2", "-", "o"),
    "numerical, randomized response": ("#009E73", "--", "^"),
    "lower bound for any randomizer": ("#000000", "-.", ""),
}


def bounds() -> dict[str, np.ndarray]:
    """Epsilons of shape (local epsilons, deltas, users)."""
    eps0, delta = LOCAL_EPSILONS[:, None, None], DELTAS[:, None]
    closed = shuffled_epsilon_closed_form(eps0, num_users=USERS, delta=delta)
    kinds = ("upper", "randomized_response", "lower")
    others = (
        shuffled_epsilon(eps0, num_users=USERS, delta=delta, kind=k) for k in kinds
    )
    return dict(zip(LOOKS, (closed, *others), strict=True))


def draw(found: dict[str, np.ndarray], path: Path) -> None:
    """Writes the picture: one panel a local epsilon."""
    figure, panels = new_figure(2, size=(10.5, 4.6), sharey=True)
    for axes, i in zip(panels, (1, 3), strict=True):
        for name, look in LOOKS.items():
            epsilon = found[name][i, SHOWN_DELTA]
            draw_curve(
                axes, USERS, epsilon, look, markersize=5, markevery=2, label=name
            )
        axes.axhline(LOCAL_EPSILONS[i], color="0.6", linewidth=1)
        axes.annotate(
            "not shuffled",
            (USERS[-1], LOCAL_EPSILONS[i]),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color="0.35",
        )
        axes.set(
            title=f"local epsilon {LOCAL_EPSILONS[i]:g}",
            xscale="log",
            yscale="log",
            ylim=(5e-5, 8),
            xlabel="users n",
        )
    delta = DELTAS[SHOWN_DELTA]
    panels[0].set_ylabel(f"epsilon (nats) after shuffling, delta = {delta:g}")
    panels[0].legend(loc="lower left", frameon=False)
    save(figure, path)


def main() -> None:
    """Prints and writes the table, draws the picture."""
    folder = path_option(__doc__, "--out", "results/shuffling")
    found = bounds()
    draw(found, folder / "shuffling.png")
    table = {
        "axes": "epsilon[bound][local epsilon][delta][users]",
        "users": USERS.tolist(),
        "local epsilons": LOCAL_EPSILONS.tolist(),
        "deltas": DELTAS.tolist(),
        "epsilon": {
            k: np.vectorize(lambda x: float(f"{x:.6g}"))(v).tolist()
            for k, v in found.items()
        },
    }
    write_table(table, folder / "shuffling.json", indent=None)
    print(
        f"delta = {DELTAS[SHOWN_DELTA]:g}; n = " + ", ".join("1e3 1e5 1e7 1e9".split())
    )
    for i, eps0 in enumerate(LOCAL_EPSILONS):
        print(f"\nlocal epsilon {eps0:g}")
        for name, values in found.items():
            cells = values[i, SHOWN_DELTA, [2, 6, 10, 14]]
            print(f"  {name:32}" + "".join(f"{c:11.3g}" for c in cells))
    print(f"\nWritten to {folder}")


if __name__ == "__main__":
    main()
