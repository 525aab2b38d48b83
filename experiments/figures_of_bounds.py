"""Figures of the theorems of `jaxdp_episodic.bounds`; `figures` draws them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    YELLOW,
    draw_curve,
    draw_level,
    new_figure,
    rounded,
    save,
)
from local_dp import (
    central_sum_error,
    local_epsilon_for_shuffled,
    local_sum_error,
    simulate_sums,
)
from tombs_multistage import multistage_delta, multistage_rates, tombs_multistage

import jaxdp_episodic as jde
from jaxdp_episodic.bounds import (
    Gaussian,
    Laplace,
    Mechanism,
    RandomizedResponse,
    bounded_iteration_rdp,
    compose_naive,
    compose_optimal_epsilon,
    delta_poisson_subsampled,
    final_variance,
    full_batch_rho,
    one_pass_rho,
    optimal_noise_stds,
    rdp_poisson_subsampled,
    rho_to_epsilon,
    shuffled_epsilon,
    shuffled_epsilon_closed_form,
    smallest_epsilon,
)

Table = dict[str, Any]


def product_rate(folder: Path) -> Table:
    """The claim of the product rate of multistage sampling, and the true delta.

    First the worked example of Tombs, Kotevska and Young (2022): 18 examples in 5
    units, one unit drawn a stage; the rate of every unit as printed (without the number
    of primary units) and as it is. Then the counterexample: 10 tasks of 40 examples,
    one task and 20 of its examples drawn, every *example* clipped. The claim takes the
    product of both rates for an amplification rate. An adversary whose data make the
    drawn task visible shows that it is none: the delta of that data set is computed
    from the two mixtures themselves.
    """
    names = ("primary", "secondary", "item")
    one_each = jde.MultistageSampling(
        *(jde.WithoutReplacement(name, size=1) for name in names)
    )
    rows = []
    for i, sizes in enumerate([[4, 2, 3], [4, 5]], start=1):
        for j, size in enumerate(sizes, start=1):
            # The tree as this unit sees it: equal units of its own sizes.
            tree = jde.Population.from_sizes([[size] * len(sizes)] * 2)
            rates = multistage_rates(one_each, clip_unit="primary", population=tree)
            row: Table = {"unit": f"U_{i}{j}", "examples": size}
            row["rate as printed"] = 1 / (len(sizes) * size)
            rows.append(row | {"rate": float(rates.inner.max())})
    # Noise in clip norms: swapping one example moves the sum by 1 standard deviation.
    tasks, examples, drawn, noise = 10, 40, 20, 2.0
    epsilon = np.round(np.linspace(0, 2.5, 26), 10)
    sampling = jde.MultistageSampling(
        jde.WithoutReplacement("task", size=1, population=tasks),
        jde.WithoutReplacement("example", size=drawn, population=examples),
    )
    swap, setting = Gaussian(noise / 2), {"sampling": sampling, "epsilon": epsilon}
    try:
        tombs_multistage(swap, clip_unit="example", **setting)
    except NotImplementedError as error:
        refusal = str(error)
    else:
        raise AssertionError("the counterexample was not refused")

    # All other examples of the differing one's task contribute +1 clip norm, all other
    # tasks' -1, the differing example +1 or -1.
    x = np.linspace(-drawn / noise - 9, drawn / noise + 9, 400_001)
    reached = drawn / examples

    def density(own: float) -> np.ndarray:
        parts = (
            (1 - 1 / tasks, -drawn),
            ((1 - reached) / tasks, drawn),
            (reached / tasks, drawn - 1 + own),
        )
        total = sum(w * np.exp(-0.5 * (x - m / noise) ** 2) for w, m in parts)
        return np.asarray(total) / np.sqrt(2 * np.pi)

    pair, width = (density(1.0), density(-1.0)), x[1] - x[0]
    true = [
        max(
            np.maximum(a - np.exp(e) * b, 0).sum() * width
            for a, b in (pair, pair[::-1])
        )
        for e in epsilon
    ]
    found = {
        "claimed: product rate": delta_poisson_subsampled(
            swap, sampling_probability=reached / tasks, epsilon=epsilon
        ),
        "true: one data set": true,
        "proved: example clipped": multistage_delta(
            swap, clip_unit="example", **setting
        ),
        "proved: task clipped": tombs_multistage(swap, clip_unit="task", **setting),
    }
    figure, (left, right) = new_figure(2, size=(10.5, 4.4), width_ratios=(1, 1.35))
    place = np.arange(len(rows))
    for shift, key, label, color, hatch in (
        (-0.2, "rate as printed", "as printed", "white", "///"),
        (0.2, "rate", "rate", BLUE, ""),
    ):
        heights = [row[key] for row in rows]
        style: Table = {"label": label, "color": color, "edgecolor": "0.2"}
        bars = left.bar(place + shift, heights, 0.38, hatch=hatch, **style)
        labels = [f"1/{1 / height:.0f}" for height in heights]
        left.bar_label(bars, labels, padding=2, fontsize=9)
    left.set(
        title="Worked example: one draw a stage",
        xlabel="unit (its number of examples)",
        ylabel="chance that an example is drawn",
        ylim=(0, 0.19),
    )
    words = [f"$U_{{{row['unit'][2:]}}}$ ({row['examples']})" for row in rows]
    left.set_xticks(place, words)
    left.legend(frameon=False, loc="upper right")
    looks = ((ORANGE, "--", ""), (BLACK, "", "o"), (BLUE, "-", ""))
    for name, look in zip(found, looks, strict=False):
        style = {"markersize": 4.5, "markerfacecolor": look[0], "markevery": 2}
        draw_curve(right, epsilon, found[name], look, label=name, **style)
    right.set(
        title=f"{tasks} tasks, 1 drawn; {examples} examples, {drawn} drawn and clipped",
        yscale="log",
        ylim=(1e-9, 0.1),
        xlabel="epsilon (nats)",
        ylabel="delta of one step",
    )
    right.legend(frameon=False, loc="lower left")
    save(figure, folder / "product_rate.png", grid="y")
    return {
        "example": rows,
        "epsilon": epsilon.tolist(),
        "delta": rounded(found, 6),
        "refusal": refusal,
    }


def poisson_rdp(folder: Path) -> Table:
    """Composition of a Poisson-subsampled Gaussian by every accounting method.

    The two settings of the poster of Zhu and Wang (2019): noise 5 and noise 1, sampling
    probability 1e-3, epsilon at delta = 1e-8 against the number of steps up to 10^6.
    Naive and strong composition know two numbers of a step, the RDP bounds a curve;
    "exact" is the privacy of the whole run. The lower bound is one of the RDP, not of
    epsilon: no RDP bound for all mechanisms does better, an exact accounting may. The
    table ends with how the RDP of one step grows.
    """
    rate, delta = 1e-3, 1e-8
    steps = np.unique(np.rint(10 ** np.linspace(0, 6, 25)).astype(int))
    orders = np.unique(np.rint(10 ** np.linspace(np.log10(2), 3.3, 120)))
    sampled: Table = {"sampling_probability": rate}
    looks = {
        "naive composition": (GREY, ":", "x"),
        "strong composition, optimal": (YELLOW, "--", "^"),
        "RDP, general bound": (ORANGE, "-.", "s"),
        "RDP, tight bound": (BLUE, "-", "o"),
        "RDP, lower bound": (SKY, ":", "v"),
        "exact": (BLACK, "-", ""),
    }

    def one_step(noise: float, share: np.ndarray) -> np.ndarray:
        def log_delta(epsilon: np.ndarray, index: np.ndarray) -> np.ndarray:
            del index
            mechanism = Gaussian(noise)
            with np.errstate(divide="ignore"):
                return np.log(
                    delta_poisson_subsampled(mechanism, epsilon=epsilon, **sampled)
                )

        # At epsilon 60 a step of this noise has no delta left that float64 can show.
        return smallest_epsilon(log_delta, np.log(share), np.full(share.shape, 60.0))

    def by_rdp(noise: float, bound: str) -> np.ndarray:
        curve = rdp_poisson_subsampled(
            Gaussian(noise), orders=orders, bound=bound, **sampled
        )
        return _epsilon_of_rdp(steps[:, None] * curve, orders, delta)

    figure, panels = new_figure(2, size=(10.5, 4.6), sharey=True)
    epsilons = {}
    for axes, noise in zip(panels, (5.0, 1.0), strict=True):
        half = delta / 2 / steps
        naive, _ = compose_naive(
            one_step(noise, delta / steps), delta / steps, num_steps=steps
        )
        strong = compose_optimal_epsilon(
            one_step(noise, half), half, num_steps=steps, total_delta=delta
        )
        step = jde.GaussianStep(
            jde.Poisson("example", **sampled), noise_multiplier=noise
        )
        exact = np.asarray(jde.epsilon(step, num_steps=steps, delta=delta))
        rdp = (by_rdp(noise, bound) for bound in ("general", "tight", "lower"))
        found = dict(zip(looks, (naive, strong, *rdp, exact), strict=True))
        epsilons[f"noise {noise:g}"] = {
            name: np.round(values, 9).tolist() for name, values in found.items()
        }
        for name, look in looks.items():
            style: Table = {"markersize": 5, "markevery": 3, "label": name}
            style["linewidth"] = 2.2 if name == "exact" else 1.5
            draw_curve(axes, steps, found[name], look, **style)
        axes.set(
            title=f"noise multiplier {noise:g}, sampling probability {rate:g}",
            xscale="log",
            yscale="log",
            ylim=(3e-4, 300),
            xlabel="steps",
        )
    panels[0].set_ylabel(f"epsilon (nats) at delta = {delta:g}")
    panels[0].legend(loc="upper left", frameon=False, fontsize=9.5)
    save(figure, folder / "poisson_rdp.png")
    mechanisms: dict[str, Mechanism] = {
        "Gaussian, noise 5": Gaussian(5.0),
        "Laplace, scale 2": Laplace(2.0),
        "randomized response, epsilon 1": RandomizedResponse(1.0),
    }
    growth = []
    for name, mechanism in mechanisms.items():
        for order in (2, 4, 16, 64):
            scale = order * rate**2 * mechanism.rdp(2.0)
            row: Table = {"mechanism": name, "order": order}
            for bound in ("general", "tight", "lower"):
                options: Table = {"orders": order, "bound": bound, **sampled}
                row[bound] = float(rdp_poisson_subsampled(mechanism, **options) / scale)
            growth.append(row)
    return {
        "about": f"epsilon at delta {delta:g}, sampling probability {rate:g}",
        "steps": steps.tolist(),
        "epsilon": epsilons,
        "rdp over alpha rate^2 rdp(2)": growth,
    }


def _epsilon_of_rdp(curve: np.ndarray, orders: np.ndarray, delta: float) -> np.ndarray:
    """Epsilon by Rényi DP at the best of the orders, which are the last axis."""
    value = curve + np.log1p(-1 / orders)
    value -= (np.log(delta) + np.log(orders)) / (orders - 1)
    return np.maximum(value.min(axis=-1), 0.0)


def shuffling(folder: Path) -> Table:
    """What shuffling gains: four bounds over n, local epsilon and delta.

    Closed form and numerical bound for any local randomizer, the bound for binary
    randomized response, and a lower bound that no bound for all randomizers can beat.
    """
    users = np.rint(10 ** np.linspace(2, 9, 15)).astype(int)
    local, deltas = np.array([0.5, 1.0, 2.0, 4.0]), np.array([1e-6, 1e-8, 1e-12])
    shown = 1  # index of the delta in the picture
    looks = {
        "closed form": (ORANGE, ":", "s"),
        "numerical, any randomizer": (BLUE, "-", "o"),
        "numerical, randomized response": (GREEN, "--", "^"),
        "lower bound for any randomizer": (BLACK, "-.", ""),
    }
    eps0, options = local[:, None, None], {"num_users": users, "delta": deltas[:, None]}
    closed = shuffled_epsilon_closed_form(eps0, **options)
    kinds = ("upper", "randomized_response", "lower")
    others = (shuffled_epsilon(eps0, kind=kind, **options) for kind in kinds)
    found = dict(zip(looks, (closed, *others), strict=True))
    figure, panels = new_figure(2, size=(10.5, 4.6), sharey=True)
    for axes, i in zip(panels, (1, 3), strict=True):
        for name, look in looks.items():
            style: Table = {"markersize": 5, "markevery": 2, "label": name}
            draw_curve(axes, users, found[name][i, shown], look, **style)
        level: Table = {"linestyle": "-", "ha": "right", "fontsize": 10.5}
        draw_level(axes, "not shuffled", users[-1], local[i], **level)
        axes.set(
            title=f"local epsilon {local[i]:g}",
            xscale="log",
            yscale="log",
            ylim=(5e-5, 8),
            xlabel="users n",
        )
    label = f"epsilon (nats) after shuffling, delta = {deltas[shown]:g}"
    panels[0].set_ylabel(label)
    panels[0].legend(loc="lower left", frameon=False)
    save(figure, folder / "shuffling.png")
    return {
        "axes": "epsilon[bound][local epsilon][delta][users]",
        "users": users.tolist(),
        "local epsilons": local.tolist(),
        "deltas": deltas.tolist(),
        "epsilon": rounded(found, 6),
    }


def iteration(folder: Path) -> Table:
    """What releasing only the last iterate gains, and in which steps noise is best.

    One pass over the data, 1,000 batches of 10: who comes early is hidden by the steps
    that follow. The noise needed for one guarantee for everybody sits at the end; with
    steps that shrink some of it comes earlier. Many passes on a bounded set, 10,000
    examples, diameter 1: composition grows with the number of steps, the bound for the
    last iterate stops.
    """
    delta, batches, noise = 1e-6, 1_000, 1.0
    loss: Table = {"smoothness": 1.0, "strong_convexity": 0.0}
    positions = np.arange(1, batches + 1)
    schedules = {
        "constant steps": (np.full(batches, 0.1), (BLUE, "-", "s")),
        "steps ~ 1/sqrt(t)": (0.5 / np.sqrt(positions), (ORANGE, "--", "D")),
    }
    figure, (left, middle, right) = new_figure(3, size=(12.5, 4.3), font_size=10)
    first: dict[str, Table] = {}
    shown = [0, 9, 99, 499, 899, 989, 998, 999]
    label = ["variance of the last iterate, best / equal:"]
    for name, (rates, (color, line, marker)) in schedules.items():
        run: Table = {"learning_rates": rates, "lipschitz": 1.0, "batch_size": 10}
        rho = one_pass_rho(noise_stds=noise, **run, **loss)
        best = optimal_noise_stds(float(rho.max()), **run, **loss)
        epsilon = np.asarray(rho_to_epsilon(rho, delta=delta))
        equal, least = (
            final_variance(learning_rates=rates, noise_stds=one, **loss)
            for one in (noise, best)
        )
        label.append(f"  {name}: {least / equal:.2g}")
        first[name] = {
            "positions": [i + 1 for i in shown],
            "epsilon": rounded(epsilon[shown], 6),
            "best noise": rounded(best[shown], 6),
            "variance, equal noise": equal,
            "variance, best noise": least,
        }
        style: Table = {"color": color, "linestyle": line, "label": name}
        left.plot(positions, epsilon, **style)
        visible = np.where(best > 1e-9, best, np.nan)
        middle.plot(positions[:-1], visible[:-1], **style)
        is_plain = line == "-"
        style = {"markerfacecolor": "white" if is_plain else color, "clip_on": False}
        style["markersize"] = 10 if is_plain else 5
        look = color, "", marker
        draw_curve(middle, positions[-1:], visible[-1:], look, **style)
    arrow: Table = {"arrowprops": {"arrowstyle": "->", "color": "0.4"}, "fontsize": 9}
    words = (
        "the last batch has\nthe noise of both;\nconstant steps: no\nnoise before it"
    )
    middle.annotate(words, (batches, noise), xytext=(560, 0.16), **arrow)
    level: Table = {"linestyle": "-", "xytext": (0, 4), "fontsize": 10}
    draw_level(middle, "equal noise", 20, noise, **level)
    place: Table = {"transform": middle.transAxes, "fontsize": 9}
    middle.text(0.04, 0.05, "\n".join(label), **place)
    left.set(
        title="One pass: who comes early is hidden",
        xlabel="position of the batch",
        ylabel=f"epsilon (nats) at delta = {delta:g}",
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
    steps = np.unique(np.rint(10 ** np.linspace(0, 8, 33)).astype(int))
    orders = 1 + 10 ** np.linspace(-1.5, 2.5, 100)
    passes: Table = {"num_examples": 10_000, "learning_rate": 0.1, "lipschitz": 1.0}
    passes |= {"num_steps": steps, "noise_std": 0.1, **loss}
    second: Table = {}
    for name, diameter in (("composed", np.inf), ("last iterate", 1.0)):
        rho = full_batch_rho(diameter=diameter, **passes)
        full = np.asarray(rho_to_epsilon(rho, delta=delta))
        second[f"full batch, {name}"] = full
        batched: Table = {"orders": orders, "batch_size": 20, "diameter": diameter}
        curve = bounded_iteration_rdp(**batched, **passes)
        second[f"batches of 20, {name}"] = _epsilon_of_rdp(curve, orders, delta)
    looks = {
        "full batch, composed": (GREY, "-", ""),
        "full batch, last iterate": (BLACK, "-", "o"),
        "batches of 20, composed": (SKY, "--", ""),
        "batches of 20, last iterate": (BLUE, "--", "s"),
    }
    for name, look in looks.items():
        style = {"markersize": 4.5, "markevery": 3, "label": name}
        draw_curve(right, steps, second[name], look, **style)
    right.set(
        title="Many passes: the last iterate stops paying",
        xlabel="steps",
        ylabel=f"epsilon (nats) at delta = {delta:g}",
        xscale="log",
        yscale="log",
        ylim=(1e-3, 3e3),
    )
    right.legend(frameon=False, loc="upper left", fontsize=9)
    save(figure, folder / "iteration.png")
    epsilons = {name: rounded(second[name], 6) for name in looks}
    return {
        "one pass": first,
        "many passes": {"steps": steps.tolist(), "epsilon": epsilons},
    }


def local_dp(folder: Path) -> Table:
    """Counting ones with a curator, without one, and with a shuffler.

    Root-mean-square error of the count at one epsilon, by simulation (markers, 2,000
    trials, up to 10^7 users) and by formula (lines). Shuffled are the local answers, at
    the larger local epsilon that shuffling brings back to epsilon.
    """
    epsilon, delta, trials, share = 1.0, 1e-8, 2_000, 0.3
    users = 10 ** np.arange(2, 8)
    local = local_epsilon_for_shuffled(epsilon, num_users=users, delta=delta)
    same = np.full(users.shape, epsilon)
    models = {
        "local": ("local", same, (ORANGE, "--", "s")),
        "shuffled": ("local", np.asarray(local), (BLUE, "-.", "^")),
        "central": ("central", same, (BLACK, "-", "o")),
    }
    figure, (left, right) = new_figure(2, size=(10.5, 4.4), width_ratios=(1.25, 1))
    formula, measured = {}, {}
    for name, (model, epsilons, (color, line, marker)) in models.items():
        exact = np.full(users.shape, central_sum_error(epsilon))
        if model == "local":
            exact = local_sum_error(epsilons, num_users=users)
        errors = []
        for seed, (n, one) in enumerate(zip(users.tolist(), epsilons, strict=True)):
            ones = int(share * n)
            run: Table = {"num_ones": ones, "num_users": n, "epsilon": float(one)}
            run |= {"model": model, "num_trials": trials, "seed": seed}
            errors.append(np.sqrt(np.mean((simulate_sums(**run) - ones) ** 2)))
        formula[name], measured[name] = exact, np.array(errors)
        draw_curve(left, users, exact, (color, line, ""))
        draw_curve(left, users, errors, (color, "", marker), markersize=6)
        draw_curve(left, [], [], (color, line, marker), label=name, markersize=6)
    left.set(
        title=f"Error of a count at epsilon = {epsilon:g}",
        xscale="log",
        yscale="log",
        ylim=(0.5, 1e4),
        xlabel="users n",
        ylabel="root-mean-square error (users)",
    )
    left.legend(frameon=False, loc="upper left")
    draw_curve(right, users, local, (BLUE, "-", "^"))
    level: Table = {"linestyle": "-", "xytext": (0, 4), "ha": "right", "fontsize": 10.5}
    draw_level(right, "not shuffled", users[-1], epsilon, **level)
    right.set(
        title=f"Local epsilon that shuffles to {epsilon:g}, delta = {delta:g}",
        xscale="log",
        ylim=(0, 14),
        xlabel="users n",
        ylabel="local epsilon (nats)",
    )
    save(figure, folder / "local_dp.png")
    return {
        "epsilon": epsilon,
        "delta of the shuffler": delta,
        "users": users.tolist(),
        "local epsilon under the shuffler": np.round(local, 6).tolist(),
        "error": {k: np.round(v, 4).tolist() for k, v in formula.items()},
        "simulated error": {k: np.round(v, 4).tolist() for k, v in measured.items()},
    }


FIGURES: dict[str, Callable[[Path], Table]] = {
    "product_rate": product_rate,
    "poisson_rdp": poisson_rdp,
    "shuffling": shuffling,
    "iteration": iteration,
    "local_dp": local_dp,
}
