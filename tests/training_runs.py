"""Small steps, data and trainers that several test files train with."""

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget, plan_budget
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.learners.models import MLP, split_model
from jaxdp_episodic.trainer.run.assemble import AdaptiveTrainer
from jaxdp_episodic.trainer.run.evaluation import PrivateValidation
from jaxdp_episodic.trainer.run.store import RunStore, create_store
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics
from jaxdp_episodic.training import MAML, AdaptiveBudget, Evaluation, ProtoNet, Trainer

WAYS, SHOTS, QUERIES = 3, 1, 2
DELTA = 1e-5

# A training config that takes a second.
TINY = """
version = 1
epsilon = 8.0
delta = 1e-5
num_steps = 3
l2_clip_norm = 0.1
[data]
type = "Glyphs"
small = true
[step.sampling]
type = "GroupedClasses"
num_classes = 40
ways = 4
episodes = { type = "Poisson", name = "episode", sampling_probability = 0.5 }
examples = { type = "WithoutReplacement", name = "example", size = 3, population = 20 }
[learner]
kind = "protonet"
shots = 1
[model]
kind = "conv_embedding"
channels = [4]
embedding = 4
[evaluation]
splits = ["validation"]
queries = 2
num_episodes = 20
"""

# A private classifier of the training classes.
CLASSIFIER = """
version = 1
epsilon = 8.0
delta = 1e-5
num_steps = 3
l2_clip_norm = 0.5
[data]
type = "Glyphs"
small = true
[step]
clip_unit = "example"
neighboring_relation = "zero_out"
[step.sampling]
type = "MultistageSampling"
levels = [
  { type = "Poisson", name = "class", sampling_probability = 1.0 },
  { type = "Poisson", name = "example", sampling_probability = 0.2, population = 20 },
]
[learner]
kind = "classifier"
shots = 1
[model]
kind = "mlp"
channels = [6]
[evaluation]
ways = 5
num_episodes = 20
"""

# The same as `TINY` with a model that compiles faster.
TINY_LINEAR = TINY.replace('"conv_embedding"\nchannels = [4]', '"linear"')

# Noisy scores on two episodes, in which all of the held-out glyphs are.
CHECK_SAMPLING = """
[adaptive.check.sampling]
type = "GroupedClasses"
num_classes = 8
ways = 4
episodes = { type = "Poisson", name = "episode", sampling_probability = 1.0 }
examples = { type = "WithoutReplacement", name = "example", size = 20, population = 20 }
"""

SEARCH = """
version = 1
delta = 1e-5
{target}
split = "validation"
held_out_is_public = true
[trials]
{trials}
[hyperparameters]
"optimizer.learning_rate" = {{ type = "LogUniform", low = 1e-3, high = 1e-2 }}
"l2_clip_norm" = {{ type = "Choice", values = [0.05, 0.1] }}
"model.embedding" = {{ type = "Integers", low = 3, high = 5 }}
{more}
[run]
"""
ONE_RUN = 'type = "NegativeBinomialTrials"\nexpected_runs = 1.0'
FOUR_RUNS = 'type = "NegativeBinomialTrials"\nexpected_runs = 4.0\neta = 1.0'


def search_file(folder, *, target="epsilon = 8.0", trials=FOUR_RUNS, more="", run=None):
    """Writes a search over the runs of `TINY`, or of this text."""
    if run is None:
        lines = [one for one in TINY.splitlines() if one[:5] not in ("epsil", "delta")]
        run = "\n".join(lines).replace("version = 1", "")
    for name in ("data", "step", "learner", "model", "evaluation"):
        run = run.replace(f"[{name}", f"[run.{name}")
    path = folder / "search.toml"
    path.write_text(SEARCH.format(target=target, trials=trials, more=more) + run)
    return path


# A question to the planner.
PLAN = """
version = 1
epsilon = 4.0
delta = 1e-5
privacy_unit = "example"
schemes = ["poisson"]
[data]
type = "Glyphs"
small = true
[episode]
ways = 4
shots = 1
examples = [3]
population = 20
[compute]
episodes_per_step = 4
total_episodes = 200
fewest_steps = 20
most_steps = 60
[train]
l2_clip_norm = 0.1
[train.learner]
kind = "protonet"
[train.model]
kind = "conv_embedding"
channels = [4]
embedding = 4
"""

KEY = bytes(range(32))


class Interrupted:
    """Calls a function, except for one call, which is interrupted."""

    def __init__(self, function, call):
        self.function, self.left = function, call

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.function(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.function, name)


class Rows(NamedTuple):
    """Clip units, and which of them count; see `linear_loss`."""

    data: Any
    unit_mask: Any


def linear_loss(params, unit):
    """A loss whose gradient is the unit itself."""
    return jax.numpy.vdot(params, unit.data)


def noised(gradient, params, blocks, key=KEY, **settings):
    """What a `PrivateGradient` returns with the noise of a key."""
    noise = gradient.noise(params, key, settings["noise_multiplier"])
    return gradient(params, blocks, noise, **settings)


def flat_step(*, noise_multiplier=1.0, rate=0.02):
    sampling = jde.Poisson("user", sampling_probability=rate)
    return jde.GaussianStep(sampling, noise_multiplier=noise_multiplier)


_SIZES = "size", "population"


def tree_step(clip_unit, levels, **settings):
    """A step on a tree: of each level's units a share, or (size,) or (size, of all)."""
    schemes = [
        jde.WithoutReplacement(name, **dict(zip(_SIZES, taken, strict=False)))
        if isinstance(taken, tuple)
        else jde.Poisson(name, sampling_probability=taken)
        for name, taken in levels.items()
    ]
    sampling = jde.MultistageSampling(*schemes)
    how = {"noise_multiplier": 1.0, "clip_unit": clip_unit, **settings}
    return jde.GaussianStep(sampling, **how)


GROUPED = jde.GaussianStep(
    jde.GroupedClasses(
        num_classes=30,
        ways=WAYS,
        episodes=jde.Poisson("episode", sampling_probability=0.5),
        examples=jde.WithoutReplacement("example", size=SHOTS + QUERIES, population=6),
    ),
    noise_multiplier=1.0,
)

BINS = dataclasses.replace(
    GROUPED,
    sampling=dataclasses.replace(
        GROUPED.design, episodes=jde.RandomAllocation("episode", steps_per_epoch=4)
    ),
)


def classes(*, num_classes=30, examples=6, seed=0):
    """Classes in the plane, each a cluster."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(num_classes, 1, 2)) * 3
    points = centers + 0.3 * rng.normal(size=(num_classes, examples, 2))
    return ExampleTable.from_records(
        points.reshape(-1, 2),
        units={"class": np.repeat(np.arange(num_classes), examples)},
    )


def owned(data=None, first=0):
    """Six people, numbered from ``first``; each has one example of every class."""
    data = classes() if data is None else data
    return ExampleTable.from_records(
        data.features,
        units={"class": data.class_places},
        owners=first + np.tile(np.arange(6), data.population.num_units(1)),
    )


def grouped_step(data, *, rate=0.5, neighboring_relation="add_remove"):
    sampling = jde.GroupedClasses(
        num_classes=data.population.num_units(1),
        ways=WAYS,
        episodes=jde.Poisson("episode", sampling_probability=rate),
        examples=jde.WithoutReplacement("example", size=SHOTS + QUERIES),
    )
    return jde.GaussianStep(
        sampling,
        noise_multiplier=1.0,
        population=data.population,
        neighboring_relation=neighboring_relation,
    )


def protonet(seed=0):
    learner, params = _made_protonet(seed)
    return learner, jax.tree.map(lambda leaf: leaf, params)  # its own dictionaries


@functools.cache  # one learner is compiled once
def _made_protonet(seed):
    apply, params = split_model(MLP(2, (8,), 4, rngs=nnx.Rngs(seed)))
    return ProtoNet(apply, ways=WAYS), params


# The same optimizer is compiled once.
adam, sgd = functools.cache(optax.adam), functools.cache(optax.sgd)


def charged_run(path, budget, number=0, *, option=None, is_seeded=False):
    """Creates a run's file if there is none, and charges steps; returns the path."""
    if not path.exists():
        create_store(path, budget, is_seeded=is_seeded)
    if number:
        with contextlib.closing(RunStore(path)) as store:
            store.begin_session({"machine": "this one"})
            for _ in range(number):
                store.charge(option or "phase 1")
    return path


_BUDGETS: dict[tuple, PrivacyBudget] = {}


class PlainBudget(PrivacyBudget):
    """A budget by the Gaussian without sampling, so that nothing compiles.

    An upper bound by Bun and Steinke (2016), arXiv:1605.02065, Proposition 1.3.
    """

    def spent(self, num_steps):
        rho = np.asarray(num_steps) / (2 * self.step.noise_multiplier**2)
        return rho + 2 * np.sqrt(rho * np.log(1 / self.delta))


def plain_trainer(*, num_steps=6, data=None, learner=None, step=GROUPED, **changes):
    """A run with noise on public sizes that starts quickly."""
    model, params = protonet() if learner is None else learner
    arguments = {"l2_clip_norm": 0.5, "shots": SHOTS, "seed": 1, **changes}
    arguments.setdefault("optimizer", adam(0.05))
    budget = PlainBudget(step, 1e9, 1e-5, num_steps, num_steps)
    arguments.setdefault("budget", budget)
    data = classes() if data is None else data
    return Trainer(model, params, data=data, **arguments)


def trainer(
    *,
    epsilon=8.0,
    num_steps=6,
    seed=1,
    data=None,
    step=None,
    learner=None,
    learning_rate=0.05,
    delta=1e-5,
    **changes,
):
    """A private few-shot run with steps of milliseconds."""
    data = classes() if data is None else data
    step = grouped_step(data) if step is None else step
    # Hundreds of tests use the same few budgets.
    key = repr(step), epsilon, delta, num_steps
    if key not in _BUDGETS:
        _BUDGETS[key] = plan_budget(
            step, epsilon=epsilon, delta=delta, num_steps=num_steps
        )
    budget = _BUDGETS[key]
    model, params = protonet() if learner is None else learner
    arguments = {"l2_clip_norm": 0.5, "shots": SHOTS, "seed": seed, **changes}
    return Trainer(
        model,
        params,
        data=data,
        budget=budget,
        optimizer=adam(learning_rate),
        **arguments,
    )


def with_statistics(data, config, step, learner, *, num_steps=2, noise=0.3, **changes):
    """A run of private statistics, then of steps."""
    own = PrivateStatistics(
        data, config, privacy_unit="example", neighboring_relation="zero_out", slots=6
    )
    step = dataclasses.replace(step, neighboring_relation="zero_out")
    before = tuple(
        dataclasses.replace(one, noise_multiplier=noise) for one in own.steps
    )
    total = len(before) + num_steps
    budget = PrivacyBudget(step, 1e9, DELTA, total, total, before)
    return plain_trainer(
        data=data, learner=learner, budget=budget, start=own, **changes
    )


def held_out(num_episodes=20):
    """An evaluation of a run on `classes`."""
    how = {"ways": WAYS, "shots": SHOTS, "queries": QUERIES}
    return Evaluation(classes(seed=9), num_episodes=num_episodes, **how)


# --- Runs that choose their steps ---

LOUD = dataclasses.replace(GROUPED, noise_multiplier=8.0)
QUIET = dataclasses.replace(GROUPED, noise_multiplier=4.0)
CHECK = jde.GaussianStep(
    jde.GroupedClasses(
        num_classes=12,
        ways=WAYS,
        episodes=jde.Poisson("episode", sampling_probability=1.0),
        examples=jde.WithoutReplacement("example", size=6, population=6),
    ),
    noise_multiplier=5.0,
)
OPTIONS = {"loud": LOUD, "quiet": QUIET, "check": CHECK}


def adaptive_budget(quotas=(4, 3, 3), **changes):
    run = jde.AdaptiveRun(OPTIONS, quotas=dict(zip(OPTIONS, quotas, strict=True)))
    return AdaptiveBudget((run,), DELTA, checks=("check",), **changes)


def score_on(data, step=CHECK, **changes):
    """The noisy score on data."""
    return PrivateValidation(data, step, shots=SHOTS, **changes)


def by_parity(released):
    """A rule that depends on all it may see, and ends the run after 8 releases."""
    if released.number == 8:
        return None
    weight = sum(float(np.sum(leaf)) for leaf in jax.tree.leaves(released.params))
    last = released.scores[-1].value if released.scores else 0.0
    names = [name for name in sorted(released.left) if released.left[name]]
    return names[int(1e4 * abs(weight + last)) % len(names)]


def adaptive(rule=by_parity, *, plan=None, learner=None, checks=None, **changes):
    """A run that takes noisy scores, unless ``checks`` says others."""
    model, params = protonet() if learner is None else learner
    if checks is None:
        checks = {"check": score_on(classes(num_classes=12, seed=5))}
    arguments = {"l2_clip_norm": 0.5, "shots": SHOTS, "seed": 1, **changes}
    return AdaptiveTrainer(
        model,
        params,
        data=classes(),
        budget=adaptive_budget() if plan is None else plan,
        rule=rule,
        checks=checks,
        optimizer=adam(0.05),
        **arguments,
    )


def sinusoid_learner(seed=0):
    apply, params = split_model(MLP(1, (16,), 1, rngs=nnx.Rngs(seed)))
    model = MAML(
        apply, inner_steps=1, inner_learning_rate=0.01, task_loss="squared_error"
    )
    return model, params


def assert_same(run, other):
    """Parameters and optimizer state are the same to the last bit."""
    pairs = zip(jax.tree.leaves(run.state), jax.tree.leaves(other.state), strict=True)
    for a, b in pairs:
        np.testing.assert_array_equal(a, b)
