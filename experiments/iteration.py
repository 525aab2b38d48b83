"""What releasing only the last iterate buys, and where the noise belongs.

``python experiments/iteration.py --out results/iteration``.

Left: one pass over the data. Who comes early is hidden by the steps that follow. The
noise needed for one guarantee for everybody sits at the end; with steps that shrink
some of it comes earlier. Right: many passes on a bounded set. Composition grows with
the number of steps, the bound for the last iterate stops.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from drawing import draw_curve, new_figure, path_option, save, write_table

from jaxdp_episodic.bounds import (
    bounded_iteration_rdp,
    final_variance,
    full_batch_rho,
    one_pass_rho,
    optimal_noise_stds,
    rho_to_epsilon,
)

DELTA = 1e-6
LOSS = {"smoothness": 1.0, "strong_convexity": 0.0}
# One pass: 1,000 batches of 10, steps constant or shrinking.
BATCHES, BATCH, NOISE = 1_000, 10, 1.0
POSITIONS = np.arange(1, BATCHES + 1)
RATES = {
    "constant steps": np.full(BATCHES, 0.1),
    "steps ~ 1/sqrt(t)": 0.5 / np.sqrt(POSITIONS),
}
# Many passes: 10,000 examples on a set of diameter 1.
STEPS = np.unique(np.rint(10 ** np.linspace(0, 8, 33)).astype(int))
RUN = {"num_examples": 10_000, "learning_rate": 0.1, "lipschitz": 1.0, "diameter": 1.0}
RUN_NOISE, RUN_BATCH = 0.1, 20
ORDERS = 1 + 10 ** np.linspace(-1.5, 2.5, 100)


def one_pass() -> dict[str, dict]:
    """Epsilon of every position with equal noise, and the best noise for its worst."""
    found = {}
    for name, rates in RATES.items():
        run = {"learning_rates": rates, "lipschitz": 1.0, "batch_size": BATCH, **LOSS}
        rho = one_pass_rho(noise_stds=NOISE, **run)
        best = optimal_noise_stds(float(rho.max()), **run)
        cost = [
            final_variance(learning_rates=rates, noise_stds=noise, **LOSS)
            for noise in (NOISE, best)
        ]
        found[name] = {
            "epsilon": np.asarray(rho_to_epsilon(rho, delta=DELTA)),
            "noise": best,
            "variance, equal noise": cost[0],
            "variance, best noise": cost[1],
        }
    return found


def many_passes() -> dict[str, np.ndarray]:
    """Epsilon at ``STEPS``: composed, last iterate; full batches and random ones."""
    full = {
        name: rho_to_epsilon(
            full_batch_rho(
                num_steps=STEPS, noise_std=RUN_NOISE, **{**RUN, **LOSS, **change}
            ),
            delta=DELTA,
        )
        for name, change in (
            ("full batch, composed", {"diameter": np.inf}),
            ("full batch, last iterate", {}),
        )
    }
    batched = {}
    for name, change in (
        ("batches of 20, composed", {"diameter": np.inf}),
        ("batches of 20, last iterate", {}),
    ):
        rdp = bounded_iteration_rdp(
            orders=ORDERS,
            num_steps=STEPS,
            batch_size=RUN_BATCH,
            noise_std=RUN_NOISE,
            **{**RUN, **LOSS, **change},
        )
        value = rdp + np.log1p(-1 / ORDERS)
        value -= (np.log(DELTA) + np.log(ORDERS)) / (ORDERS - 1)
        batched[name] = np.maximum(value.min(axis=1), 0.0)
    return {**{k: np.asarray(v) for k, v in full.items()}, **batched}


def draw(first: dict[str, dict], second: dict[str, np.ndarray], path: Path) -> None:
    """Writes the picture: by position, best noise, many passes."""
    figure, (left, middle, right) = new_figure(3, size=(12.5, 4.3), font_size=10)
    looks = (("#0072B2", "-"), ("#D55E00", "--"))
    for (name, values), (color, line) in zip(first.items(), looks, strict=True):
        style = {"color": color, "linestyle": line, "label": name}
        left.plot(POSITIONS, values["epsilon"], **style)
        shown = np.where(values["noise"] > 1e-9, values["noise"], np.nan)
        middle.plot(POSITIONS[:-1], shown[:-1], **style)
        middle.plot(
            POSITIONS[-1],
            shown[-1],
            color=color,
            marker="sD"[line == "--"],
            markersize=10 if line == "-" else 5,
            clip_on=False,
            markerfacecolor="white" if line == "-" else color,
            linestyle="none",
        )
    middle.annotate(
        "the last batch has\nthe noise of both;\nconstant steps: no\nnoise before it",
        (BATCHES, NOISE),
        xytext=(560, 0.16),
        arrowprops={"arrowstyle": "->", "color": "0.4"},
        fontsize=9,
    )
    equal = one_pass_noise_label(first)
    middle.axhline(NOISE, color="0.5", linewidth=1)
    middle.annotate(
        "equal noise",
        (20, NOISE),
        xytext=(0, 4),
        textcoords="offset points",
        color="0.3",
    )
    middle.text(0.04, 0.05, equal, transform=middle.transAxes, fontsize=9)
    left.set(
        title="One pass: who comes early is hidden",
        xlabel="position of the batch",
        ylabel=f"epsilon (nats) at delta = {DELTA:g}",
        yscale="log",
    )
    left.legend(frameon=False, loc="upper left")
    middle.set(
        title="Least noise for the same worst epsilon",
        xlabel="position of the batch",
        ylabel="noise (in units of the gradient)",
        yscale="log",
        ylim=(1e-3, 3),
    )
    passes = (("#999999", "-", ""), ("#000000", "-", "o"))
    passes += (("#56B4E9", "--", ""), ("#0072B2", "--", "s"))
    for (name, values), look in zip(second.items(), passes, strict=True):
        draw_curve(right, STEPS, values, look, markersize=4.5, markevery=3, label=name)
    right.set(
        title="Many passes: the last iterate stops paying",
        xlabel="steps",
        ylabel=f"epsilon (nats) at delta = {DELTA:g}",
        xscale="log",
        yscale="log",
        ylim=(1e-3, 3e3),
    )
    right.legend(frameon=False, loc="upper left", fontsize=9)
    save(figure, path)


def one_pass_noise_label(first: dict[str, dict]) -> str:
    """What equal noise costs in variance of the last iterate, as a line a schedule."""
    lines = ["variance of the last iterate, best / equal:"]
    for name, values in first.items():
        share = values["variance, best noise"] / values["variance, equal noise"]
        lines.append(f"  {name}: {share:.2g}")
    return "\n".join(lines)


def main() -> None:
    """Prints and writes the table, draws the picture."""
    folder = path_option(__doc__, "--out", "results/iteration")
    first, second = one_pass(), many_passes()
    draw(first, second, folder / "iteration.png")
    shown = [0, 9, 99, 499, 899, 989, 998, 999]
    table = {
        "one pass": {
            name: {
                "positions": [i + 1 for i in shown],
                "epsilon": [float(f"{values['epsilon'][i]:.6g}") for i in shown],
                "best noise": [float(f"{values['noise'][i]:.6g}") for i in shown],
                "variance, equal noise": values["variance, equal noise"],
                "variance, best noise": values["variance, best noise"],
            }
            for name, values in first.items()
        },
        "many passes": {
            "steps": STEPS.tolist(),
            "epsilon": {k: [float(f"{e:.6g}") for e in v] for k, v in second.items()},
        },
    }
    write_table(table, folder / "iteration.json")
    print(f"One pass, {BATCHES} batches of {BATCH}: epsilon of the first, the last")
    for name, values in first.items():
        print(f"  {name:20}{values['epsilon'][0]:9.4f}{values['epsilon'][-1]:9.4f}")
    print(one_pass_noise_label(first))
    print("Many passes: epsilon at 100, 10^4, 10^6, 10^8 steps")
    for name, values in second.items():
        at = [values[STEPS == s].item() for s in (100, 10**4, 10**6, 10**8)]
        print(f"  {name:30}" + "".join(f"{v:11.4g}" for v in at))
    print(f"Written to {folder}")


if __name__ == "__main__":
    main()
