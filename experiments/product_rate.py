"""What the product rate of multistage sampling claims, and what is true.

``python experiments/product_rate.py --out results/product_rate``.

First the worked example of Tombs, Kotevska and Young (2022): 18 examples in 5 units,
one unit drawn a stage; the rate of every unit as printed (without the number of
primary units) and as it is. Then the counterexample: 10 tasks of 40 examples, one task
and 20 of its examples drawn, every *example* clipped. The claim takes the product of
both rates for an amplification rate. An adversary whose data make the drawn task
visible shows that it is none: below, the delta of that very data set, computed from the
two mixtures themselves.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from drawing import new_figure, path_option, save, write_table
from tombs_multistage import (
    multistage_delta,
    multistage_rates,
    tombs_multistage,
)

import jaxdp_episodic as jde
from jaxdp_episodic.bounds import Gaussian, delta_poisson_subsampled

# Units of the example: name, path, number of examples.
EXAMPLE = [[4, 2, 3], [4, 5]]
TASKS, EXAMPLES, DRAWN = 10, 40, 20
# Noise in clip norms: swapping one example moves the sum by 1 standard deviation.
NOISE = 2.0
EPSILONS = np.round(np.linspace(0, 2.5, 26), 10)


def example_rates() -> list[dict]:
    """One row a unit of the paper's example."""
    draw = jde.MultistageSampling(
        *(jde.WithoutReplacement(n, size=1) for n in ("primary", "secondary", "item"))
    )
    rows = []
    for i, secondary in enumerate(EXAMPLE, start=1):
        for j, examples in enumerate(secondary, start=1):
            # The tree as this unit sees it: equal units of its own sizes.
            tree = jde.Population.from_sizes([[examples] * len(secondary)] * 2)
            rates = multistage_rates(draw, clip_unit="primary", population=tree)
            rows.append(
                {
                    "unit": f"U_{i}{j}",
                    "examples": examples,
                    "rate as printed": 1 / (len(secondary) * examples),
                    "rate": float(rates.inner.max()),
                }
            )
    return rows


def stages() -> jde.MultistageSampling:
    """The draw of the counterexample."""
    return jde.MultistageSampling(
        jde.WithoutReplacement("task", size=1, population=TASKS),
        jde.WithoutReplacement("example", size=DRAWN, population=EXAMPLES),
    )


def true_delta() -> np.ndarray:
    """Delta of one pair of data sets, from its two mixtures on a fine grid.

    All other examples of the differing one's task contribute +1 clip norm, all other
    tasks' -1, the differing example +1 or -1.
    """
    x = np.linspace(-DRAWN / NOISE - 9, DRAWN / NOISE + 9, 400_001)

    def dist(own: float) -> np.ndarray:
        reached = DRAWN / EXAMPLES
        parts = (
            (1 - 1 / TASKS, -DRAWN),
            ((1 - reached) / TASKS, DRAWN),
            (reached / TASKS, DRAWN - 1 + own),
        )
        total = sum(w * np.exp(-0.5 * (x - m / NOISE) ** 2) for w, m in parts)
        return np.asarray(total) / np.sqrt(2 * np.pi)

    one, two = dist(1.0), dist(-1.0)
    width = x[1] - x[0]
    return np.array(
        [
            max(
                np.maximum(a - np.exp(e) * b, 0).sum() * width
                for a, b in ((one, two), (two, one))
            )
            for e in EPSILONS
        ]
    )


def deltas() -> dict[str, np.ndarray]:
    """Claimed, true and proved delta at ``EPSILONS``."""
    swap = Gaussian(NOISE / 2)
    claim = delta_poisson_subsampled(
        swap, sampling_probability=DRAWN / EXAMPLES / TASKS, epsilon=EPSILONS
    )
    setting = {"sampling": stages(), "epsilon": EPSILONS}
    return {
        "claimed: product rate": claim,
        "true: one data set": true_delta(),
        "proved: example clipped": multistage_delta(
            swap, clip_unit="example", **setting
        ),
        "proved: task clipped": tombs_multistage(swap, clip_unit="task", **setting),
    }


def refusal() -> str:
    """What the library says to who asks for the product rate here."""
    try:
        tombs_multistage(
            Gaussian(NOISE / 2), sampling=stages(), clip_unit="example", epsilon=1.0
        )
    except NotImplementedError as error:
        return str(error)
    raise AssertionError("the counterexample was not refused")


def draw(rows: list[dict], found: dict[str, np.ndarray], path: Path) -> None:
    """Writes the picture: rates of the example, deltas of the counterexample."""
    figure, (left, right) = new_figure(2, size=(10.5, 4.4), width_ratios=(1, 1.35))
    place = np.arange(len(rows))
    for shift, key, color, hatch in (
        (-0.2, "rate as printed", "white", "///"),
        (0.2, "rate", "#0072B2", ""),
    ):
        bars = left.bar(
            place + shift,
            [row[key] for row in rows],
            0.38,
            label={"rate": "rate", "rate as printed": "as printed"}[key],
            color=color,
            edgecolor="0.2",
            hatch=hatch,
        )
        left.bar_label(
            bars, [f"1/{1 / row[key]:.0f}" for row in rows], padding=2, fontsize=9
        )
    left.set(
        title="Worked example: one draw a stage",
        xlabel="unit (its number of examples)",
        ylabel="chance that an example is drawn",
        ylim=(0, 0.19),
    )
    names = [f"$U_{{{row['unit'][2:]}}}$ ({row['examples']})" for row in rows]
    left.set_xticks(place, names)
    left.legend(frameon=False, loc="upper right")
    looks = {
        "claimed: product rate": ("#D55E00", "--", ""),
        "true: one data set": ("#000000", "", "o"),
        "proved: example clipped": ("#0072B2", "-", ""),
    }
    for name, (color, line, marker) in looks.items():
        right.plot(
            EPSILONS,
            found[name],
            color=color,
            linestyle=line or "none",
            marker=marker,
            markersize=4.5,
            markevery=2,
            label=name,
        )
    right.set(
        title=f"{TASKS} tasks, 1 drawn; {EXAMPLES} examples, {DRAWN} drawn and clipped",
        yscale="log",
        ylim=(1e-9, 0.1),
        xlabel="epsilon (nats)",
        ylabel="delta of one step",
    )
    right.legend(frameon=False, loc="lower left")
    save(figure, path, grid="y")


def main() -> None:
    """Prints and writes the tables, draws the picture."""
    folder = path_option(__doc__, "--out", "results/product_rate")
    rows, found = example_rates(), deltas()
    draw(rows, found, folder / "product_rate.png")
    table = {
        "example": rows,
        "epsilon": EPSILONS.tolist(),
        "delta": {k: [float(f"{d:.6g}") for d in v] for k, v in found.items()},
        "refusal": refusal(),
    }
    write_table(table, folder / "product_rate.json")
    for row in rows:
        print(
            f"  {row['unit']}  {row['examples']} examples   "
            f"printed 1/{1 / row['rate as printed']:.0f}   rate 1/{1 / row['rate']:.0f}"
        )
    print("\n  epsilon " + "".join(f"{name:>26}" for name in found))
    for i in (5, 10, 20):
        cells = "".join(f"{v[i]:26.3e}" for v in found.values())
        print(f"  {EPSILONS[i]:7.1f} " + cells)
    print(f"\n{table['refusal']}\n\nWritten to {folder}")


if __name__ == "__main__":
    main()
