"""Record answers of this code for random settings of every kind of pair.

    cd tests && python -m recorded.record [kind ...]

writes ``recorded/<kind>.json.gz``. The committed tables are answers of version 0.2.0 as
of commit dddca080, before its loss classes were merged; `test_recorded.py` holds later
code against them. One process on the NumPy engine; a kind takes some 20 s of CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import math
import signal
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.describe.serialization import spec_to_dict
from recorded.questions import FOLDER, ask

SEED = 20_251_128
RELATIONS = ("add_remove", "replace_one", "zero_out")
# Settings of a kind, of a spec with array fields, and of every third spec, which is
# small: of it a noise is calibrated, and the fast test asks it.
SETTINGS = 300
SIZE = 16
SLOW_SIZE = 3
SMALL_SIZE = 2
# A question that takes more, of CPU, is left out, and so are settings of a kind beyond
# so much: of people and of epochs there are fewer than `SETTINGS`.
MOST_SECONDS = 3
MOST_OF_KIND = 25
# One or two of them are asked of every spec.
QUESTIONS = ("epsilon", "delta", "epsilon by rdp", "rdp", "epsilon")


class Draw:
    """Random numbers of one spec, each an array of ``size`` settings."""

    def __init__(self, rng: np.random.Generator, size: int) -> None:
        self.rng, self.size = rng, size

    def log(self, low: float, high: float) -> np.ndarray:
        """Log-uniform numbers of four digits."""
        drawn = np.exp(self.rng.uniform(math.log(low), math.log(high), self.size))
        return np.array([float(f"{x:.4g}") for x in drawn])

    def whole(self, low: int, high: int) -> np.ndarray:
        """Log-uniform whole numbers."""
        drawn = np.rint(self.log(low, high)).astype(np.int64)
        return np.clip(drawn, low, high)

    def rate(self) -> np.ndarray:
        """Rates from 1e-6 to 1; some are 1."""
        return np.where(self.rng.random(self.size) < 0.05, 1.0, self.log(1e-6, 1))

    def one(self, *options: Any) -> Any:
        """One of a few."""
        return options[int(self.rng.integers(len(options)))]

    def poisson(self, name: str) -> jde.Poisson:
        """Coins."""
        return jde.Poisson(name, sampling_probability=self.rate())

    def sample(self, name: str, most: int = 10_000) -> jde.WithoutReplacement:
        """A sample of a fixed size; of few units sometimes all."""
        population = self.whole(2, most)
        size = np.minimum(self.whole(1, most), population)
        exact = bool(self.rng.random() < 0.3)
        return jde.WithoutReplacement(
            name, size=size, population=population, population_is_exact=exact
        )

    def scheme(self, name: str) -> Any:
        """Either of the two."""
        return self.one(self.poisson, self.sample)(name)

    def step(self, design: Any, relation: str, **fields: Any) -> jde.GaussianStep:
        """A step whose noise `with_noise` draws."""
        return jde.GaussianStep(
            design, noise_multiplier=1.0, neighboring_relation=relation, **fields
        )


def with_noise(draw: Draw, step: Any, counts: np.ndarray) -> Any:
    """Noise from .05 to 50: any, or such that epsilon is between .05 and 20."""
    if "noise_multiplier" not in {field.name for field in dataclasses.fields(step)}:
        return step
    noise = draw.log(0.05, 50)
    if draw.rng.random() < 0.6:
        like = step
        if isinstance(step, jde.TruncatedPoissonRelease):
            coin = jde.Poisson(
                "example", sampling_probability=step.sampling_probability
            )
            like = draw.step(coin, "add_remove", clip_unit="example")
        near = jde.calibrate_noise_multiplier(
            like,
            epsilon=draw.log(0.05, 20),
            delta=1e-6,
            num_steps=counts,
            method="rdp",
            tolerance=0.1,
        )
        near = np.array([float(f"{x:.4g}") for x in np.ravel(near)])
        noise = np.where((near >= 0.05) & (near <= 50), near, noise)
    return dataclasses.replace(step, noise_multiplier=noise)


# --- The kinds: each draws one spec ---


def sampled(draw: Draw) -> Any:
    """Coins at one to three stages; what is protected is clipped."""
    names = ("task", "class", "example")[: draw.one(1, 1, 2, 3)]
    return draw.step(
        jde.MultistageSampling(*map(draw.poisson, names)),
        draw.one("add_remove", "zero_out"),
        clip_unit=names[-1],
    )


def _stages(draw: Draw, relations: tuple[str, ...], scheme: str, clip: int) -> Any:
    """Stages of which that of the clipped level is given."""
    names = ("task", "class", "example")[: draw.one(*range(max(clip, 1), 4))]
    levels = [draw.scheme(name) for name in names]
    if clip:
        levels[clip - 1] = getattr(draw, scheme)(names[clip - 1])
    return draw.step(
        jde.MultistageSampling(*levels),
        draw.one(*relations),
        clip_unit=names[clip - 1] if clip else "step",
        small_units="keep",
    )


def swapped(draw: Draw) -> Any:
    """A fixed number is drawn, or the step is clipped as a whole."""
    return _stages(draw, ("add_remove", "replace_one"), "sample", draw.one(0, 1, 2))


def antipodal(draw: Draw) -> Any:
    """Coins, and contents that react."""
    return _stages(draw, ("add_remove", "replace_one"), "poisson", draw.one(1, 2))


def zeroed(draw: Draw) -> Any:
    """Contents become null, of coins or of samples."""
    scheme = draw.one("poisson", "sample")
    return _stages(draw, ("zero_out",), scheme, draw.one(0, 1, 2))


def without_replacement(draw: Draw) -> Any:
    """One level, or two, of samples of a fixed size."""
    names = ("class", "example")[: draw.one(1, 2)]
    return draw.step(
        jde.MultistageSampling(*map(draw.sample, names)),
        draw.one(*RELATIONS),
        clip_unit=names[-1],
        small_units="keep",
    )


def grouped(draw: Draw, **fields: Any) -> Any:
    """Classes in groups."""
    ways = draw.whole(1, 20)
    num_classes = ways * draw.whole(2, 500)
    how = draw.one("coins", "sample", "classes")
    given: dict[str, Any] = {"episodes": draw.poisson("episode")}
    if how == "sample":
        size = np.minimum(draw.whole(1, 100), num_classes // ways)
        given = {"episodes": jde.WithoutReplacement("episode", size=size)}
    if how == "classes":
        size = np.minimum(ways * draw.whole(1, 100), num_classes)
        given = {"classes": jde.WithoutReplacement("class", size=size)}
        given = draw.one(given, {"classes": draw.poisson("class")})
    design = jde.GroupedClasses(
        num_classes=num_classes, ways=ways, examples=draw.sample("example"), **given
    )
    unit = draw.one("class", "example", "example")
    return draw.step(
        design, draw.one(*RELATIONS), privacy_unit=unit, small_units="keep"
    )


def independent_episodes(draw: Draw) -> Any:
    """Several episodes a step, each from one to three stages."""
    names = ("task", "class", "example")[: draw.one(1, 2, 3)]
    design = jde.IndependentEpisodes(
        jde.MultistageSampling(*map(draw.scheme, names)),
        num_episodes=draw.whole(1, draw.one(8, 100)),
    )
    return draw.step(design, draw.one(*RELATIONS), small_units="keep")


def truncated(draw: Draw) -> Any:
    """A Poisson sample that is cut."""
    population, rate = draw.whole(2, 100_000), draw.rate()
    batch = np.rint(population * rate * draw.log(0.3, 3)).astype(np.int64)
    return jde.TruncatedPoissonRelease(
        1.0,
        sampling_probability=rate,
        batch_size=np.where(draw.rng.random(draw.size) < 0.1, population, batch),
        population=population,
        neighboring_relation=draw.one(*RELATIONS),
    )


def gaussian_mixture(draw: Draw) -> Any:
    """A contribution of random size."""
    parts = draw.one(1, 2, 3, 5, 9)
    weights = draw.rng.dirichlet(np.ones(parts) * draw.one(0.3, 1, 3))
    return jde.GaussianMixtureRelease(
        np.exp(draw.rng.uniform(np.log(0.1), np.log(4), parts)),
        weights / weights.sum(),
        standard_deviation=float(draw.log(0.3, 20)[0]),
        sampling_probability=float(draw.rate()[0]),
        neighboring_relation=draw.one("add_remove", "zero_out"),
    )


def contributions(draw: Draw) -> Any:
    """Classes are protected, and examples, or tasks of a class, clipped."""
    top, sizes = draw.scheme("class"), draw.whole(1, 30)
    below = jde.Poisson("example", sampling_probability=draw.rate(), population=sizes)
    if draw.rng.random() < 0.4:
        size = np.minimum(draw.whole(1, 8), sizes)
        below = jde.WithoutReplacement("example", size=size, population=sizes)
    levels = (top, below)
    if draw.rng.random() < 0.3:
        levels = (draw.scheme("task"), *levels)
    return draw.step(
        jde.MultistageSampling(*levels),
        draw.one(*RELATIONS),
        clip_unit="example",
        privacy_unit="class",
        small_units="keep",
    )


def _bounds(draw: Draw, levels: int) -> jde.PersonBounds:
    names = ("examples", "classes", "tasks")[:levels]
    return jde.PersonBounds(**{name: draw.whole(1, 6) for name in names})


def _of_people(draw: Draw, design: Any, **fields: Any) -> Any:
    fields.setdefault("neighboring_relation", draw.one(*RELATIONS))
    return jde.GaussianStep(
        design,
        noise_multiplier=1.0,
        privacy_unit="person",
        small_units="keep",
        **fields,
    )


def people_trees(draw: Draw) -> Any:
    """People in several units of a tree."""
    number = draw.one(1, 2, 2, 3)
    names = ("task", "class", "example")[-number:]
    design = jde.MultistageSampling(
        *(draw.one(draw.poisson(name), draw.sample(name, 200)) for name in names)
    )
    clip = draw.one(*names, "step")
    return _of_people(draw, design, clip_unit=clip, people=_bounds(draw, number))


def people_grouped(draw: Draw) -> Any:
    """People in several classes that are put into groups."""
    ways = draw.whole(1, 5)
    num_classes = ways * draw.whole(6, 60)
    episodes: Any = draw.poisson("episode")
    if draw.rng.random() < 0.4:
        episodes = jde.WithoutReplacement("episode", size=draw.whole(1, 6))
    design = jde.GroupedClasses(
        num_classes=num_classes,
        ways=ways,
        episodes=episodes,
        examples=draw.sample("example", 50),
    )
    return _of_people(draw, design, people=_bounds(draw, 2))


def people_blocks(draw: Draw) -> Any:
    """Episodes of blocks of people."""
    block = draw.whole(1, 20)
    blocks, each = draw.whole(2, 200), draw.one(np.int64(1), draw.whole(1, 5))
    episodes: Any = draw.poisson("episode")
    if draw.rng.random() < 0.4:
        size = np.minimum(draw.whole(1, 20), blocks * each)
        episodes = jde.WithoutReplacement("episode", size=size)
    inside, people = None, None
    if draw.rng.random() < 0.5:
        inside, people = draw.sample("example", 50), _bounds(draw, 1)
    design = jde.PeopleBlocks(
        num_people=block * blocks,
        people_per_block=block,
        episodes=episodes,
        episodes_per_block=each,
        sampling=inside,
    )
    return _of_people(draw, design, people=people)


def people_episodes(draw: Draw) -> Any:
    """People in several of many independent episodes."""
    number = draw.one(1, 2)
    names = ("class", "example")[-number:]
    design = jde.IndependentEpisodes(
        jde.MultistageSampling(
            *(draw.one(draw.poisson(name), draw.sample(name, 200)) for name in names)
        ),
        num_episodes=draw.whole(1, 8),
    )
    return _of_people(draw, design, people=_bounds(draw, number))


def _in_epochs(draw: Draw, scheme: Callable[[str], Any], relation: str) -> Any:
    """Trees, grouped classes and blocks whose episodes are allocated."""
    fields: dict[str, Any] = {"neighboring_relation": relation, "small_units": "keep"}
    how = draw.one("plain", "plain", "tree", "grouped", "person", "blocks")
    if how == "blocks":
        design: Any = jde.PeopleBlocks(
            num_people=60,
            people_per_block=5,
            episodes=scheme("episode"),
            episodes_per_block=draw.whole(1, 3),
        )
    elif how == "grouped":
        design = jde.GroupedClasses(
            num_classes=60,
            ways=5,
            episodes=scheme("episode"),
            examples=draw.sample("example", 100),
        )
        fields["privacy_unit"] = draw.one("class", "example")
    else:
        below = (draw.scheme("example"),) if how == "tree" else ()
        design = jde.MultistageSampling(scheme("class"), *below)
        fields["clip_unit"] = "class"
    if how == "person":
        people = jde.PersonBounds(examples=draw.whole(1, 4))
        fields.update(privacy_unit="person", people=people)
    return jde.GaussianStep(design, noise_multiplier=1.0, **fields)


def _allocation(relation: str, most: int) -> Callable[[Draw], Any]:
    def kind(draw: Draw) -> Any:
        steps = draw.whole(1, most)
        times = np.minimum(draw.one(np.int64(1), draw.whole(1, 3)), steps)
        return _in_epochs(
            draw,
            lambda name: jde.RandomAllocation(name, steps_per_epoch=steps, times=times),
            relation,
        )

    return kind


def shuffled(draw: Draw) -> Any:
    """Shuffled epochs."""
    steps = draw.whole(1, 1000)
    return _in_epochs(
        draw,
        lambda name: jde.ShuffledEpochs(name, steps_per_epoch=steps),
        draw.one(*RELATIONS),
    )


def laplace(draw: Draw) -> Any:
    """Laplace noise, by coins."""
    relation = draw.one(*RELATIONS)
    rate = 1.0 if relation == "replace_one" else draw.rate()
    return jde.LaplaceRelease(
        1.0, sampling_probability=rate, neighboring_relation=relation
    )


def discrete_laplace(draw: Draw) -> Any:
    """Integer noise."""
    relation = draw.one(*RELATIONS)
    rate = 1.0 if relation == "replace_one" else float(draw.rate()[0])
    return jde.DiscreteLaplaceRelease(
        float(draw.log(0.02, 3)[0]),
        sensitivity=draw.one(1, 1, 2, 5),
        sampling_probability=rate,
        neighboring_relation=relation,
    )


def randomized_response(draw: Draw) -> Any:
    """One of several answers."""
    return jde.RandomizedResponse(
        float(draw.log(0.02, 1)[0]),
        draw.one(2, 3, 10, 100),
        neighboring_relation=draw.one("replace_one", "zero_out"),
    )


def approximate_dp(draw: Draw) -> Any:
    """Mere claims."""
    lost = draw.one(np.float64(0), draw.log(1e-14, 1e-6))
    return jde.ApproximateDP(draw.log(1e-4, 3), lost)


def zero_concentrated(draw: Draw) -> Any:
    """Claims of zCDP, some of them Gaussian."""
    gaussian = draw.one(True, False)
    xi = np.float64(0) if gaussian else draw.one(np.float64(0), draw.log(1e-5, 0.1))
    return jde.ZeroConcentratedDP(draw.log(1e-7, 1), xi=xi, is_gaussian=gaussian)


def renyi_dp(draw: Draw) -> Any:
    """Claims at some orders."""
    orders = np.unique(1 + draw.log(0.1, 200)[: draw.one(1, 2, 16)])
    rdp = float(draw.log(1e-6, 0.1)[0]) * orders
    if draw.rng.random() < 0.3:
        orders, rdp = np.append(orders, np.inf), np.append(rdp, 3 * rdp[-1])
    return jde.RenyiDP(orders, rdp)


def composed(draw: Draw) -> Any:
    """Steps of two or three kinds, and a release now and then."""
    relation = draw.one(*RELATIONS)
    parts: list[Any] = []
    for _ in range(draw.one(2, 2, 3)):
        design = jde.MultistageSampling(draw.scheme("class"), draw.scheme("example"))
        clip = draw.one("class", "example")
        step = draw.step(design, relation, clip_unit=clip, small_units="keep")
        counts = draw.whole(1, 10_000)
        parts.append((with_noise(draw, step, counts), counts))
    if draw.rng.random() < 0.3:
        release = draw.one(
            jde.ApproximateDP(draw.log(1e-3, 0.5)),
            jde.ZeroConcentratedDP.of_gaussian(draw.log(2, 50)),
            jde.LaplaceRelease(draw.log(3, 50), neighboring_relation=relation),
        )
        parts.append((release, draw.whole(1, 5)))
    return jde.compose(*parts)


def population(draw: Draw) -> Any:
    """Unequal trees: the worst path counts."""
    sizes = draw.rng.integers(1, 40, (draw.one(3, 6), draw.one(2, 5))).tolist()
    levels = []
    for name in ("task", "class", "example"):
        sample = jde.WithoutReplacement(name, size=draw.whole(1, 10))
        levels.append(draw.one(draw.poisson(name), sample))
    return draw.step(
        jde.MultistageSampling(*levels),
        draw.one(*RELATIONS),
        clip_unit=draw.one("task", "class", "example"),
        population=jde.Population.from_sizes(sizes),
        small_units="keep",
    )


# Each kind, and how many settings a spec of it has: few where an answer is slow.
KINDS: dict[str, tuple[Callable[[Draw], Any], int]] = {
    "sampled": (sampled, SIZE),
    "swapped": (swapped, SIZE),
    "antipodal": (antipodal, SIZE),
    "zeroed": (zeroed, SIZE),
    "without_replacement": (without_replacement, SIZE),
    "grouped": (grouped, SIZE),
    "independent_episodes": (independent_episodes, SLOW_SIZE),
    "truncated": (truncated, SIZE),
    "gaussian_mixture": (gaussian_mixture, SIZE),
    "contributions": (contributions, SIZE),
    "people_trees": (people_trees, SLOW_SIZE),
    "people_grouped": (people_grouped, SLOW_SIZE),
    "people_blocks": (people_blocks, SLOW_SIZE),
    "people_episodes": (people_episodes, SLOW_SIZE),
    "allocation_add_remove": (_allocation("add_remove", 1000), SLOW_SIZE),
    "allocation_zero_out": (_allocation("zero_out", 1000), SLOW_SIZE),
    "allocation_replace_one": (_allocation("replace_one", 1000), SLOW_SIZE),
    "shuffled": (shuffled, SIZE),
    "laplace": (laplace, SIZE),
    "discrete_laplace": (discrete_laplace, SIZE),
    "randomized_response": (randomized_response, SIZE),
    "approximate_dp": (approximate_dp, SIZE),
    "zero_concentrated": (zero_concentrated, SIZE),
    "renyi_dp": (renyi_dp, SIZE),
    "composed": (composed, SIZE),
    "population": (population, SIZE),
}


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Gives up, by a TimeoutError, what takes more CPU."""

    def give_up(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _near_epsilon(draw: Draw, step: Any, counts: np.ndarray) -> list[float]:
    """Epsilons of which delta is above 1e-12 or so."""
    near = jde.epsilon(step, delta=draw.log(1e-12, 0.1), num_steps=counts, method="rdp")
    near = np.clip(near * draw.log(0.3, 1), 1e-3, 100)
    return [float(f"{x:.4g}") for x in np.broadcast_to(near, counts.shape)]


def record(name: str) -> Iterator[dict[str, Any]]:
    """Yields the questions of a kind with their answers."""
    (kind, size), settings = KINDS[name], SETTINGS
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    specs, start = 0, time.process_time()
    while settings > 0 and time.process_time() - start < MOST_OF_KIND:
        small = specs % 3 == 0
        draw = Draw(rng, SMALL_SIZE if small else size)
        specs, settings = specs + 1, settings - draw.size
        step = None
        while step is None:
            # Some bounds of a person contradict the sizes.
            with contextlib.suppress(ValueError):
                step = kind(draw)
        counts = draw.whole(1, 1_000_000)
        if isinstance(step, jde.ComposedSteps):
            counts = draw.whole(1, 3)
        step = with_noise(draw, step, counts)
        encoded = json.loads(json.dumps(spec_to_dict(step)))
        questions = [*rng.choice(QUESTIONS, 2, replace=False)]
        has_noise = isinstance(step, jde.GaussianStep | jde.LaplaceRelease)
        if small and has_noise and draw.one(True, False):
            questions[0] = "calibrate"
        for question in dict.fromkeys(map(str, questions)):
            given: dict[str, Any] = {"num_steps": counts.tolist()}
            if question == "rdp":
                given = {"orders": [1.3, 8.0, 100.0]}
            elif question == "delta":
                given["epsilon"] = _near_epsilon(draw, step, counts)
            else:
                given["delta"] = draw.log(1e-12, 0.1).tolist()
            if question == "calibrate":
                given["epsilon"] = draw.log(0.05, 20).tolist()
            ends = "needed" if question == "epsilon" else "none"
            ends = "all" if small else ends
            asked = {"question": question, "step": encoded, **given, "ends": ends}
            with contextlib.suppress(TimeoutError), _at_most(MOST_SECONDS):
                yield {**asked, **ask(question, encoded, given, ends=ends)}


def main() -> None:
    """Writes the tables of the kinds that the command line names, or of all."""
    warnings.simplefilter("ignore")
    for name in sys.argv[1:] or KINDS:
        start = time.process_time()
        rows = list(record(name))
        text = json.dumps(rows, separators=(",", ":"))
        # No time stamp: the same answers make the same bytes.
        data = gzip.compress(text.encode(), mtime=0)
        (FOLDER / f"{name}.json.gz").write_bytes(data)
        taken = time.process_time() - start
        print(f"{name}: {len(rows)} questions, {len(data):,} bytes, {taken:.0f} s")


if __name__ == "__main__":
    main()
