"""What a run may release, and the state that follows from it.

A release is a gradient step, a private statistic or a noisy score.

Each mechanism is charged as one step with a description of its own. `release` draws,
computes and adds noise; its caller has charged the step. `apply` returns the state that
follows from a release, which is post-processing and may be repeated. `try_out` does
both on zeros, before any charge.
"""

from __future__ import annotations

import functools
import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.numerics.band_coefficients import band_coefficients
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget
from jaxdp_episodic.trainer.config.training_parts import ClippingConfig
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.complete import Needs
from jaxdp_episodic.trainer.draw.generators import KEY_BYTES, Keys, generator
from jaxdp_episodic.trainer.draw.groups import GroupSampler
from jaxdp_episodic.trainer.draw.sampler import Draw
from jaxdp_episodic.trainer.gradient.clipping import longest, next_clip_norm
from jaxdp_episodic.trainer.gradient.precision import training_dtype
from jaxdp_episodic.trainer.gradient.private_gradient import PrivateGradient, Released
from jaxdp_episodic.trainer.gradient.processes import Processes
from jaxdp_episodic.trainer.learners import episode
from jaxdp_episodic.trainer.learners.optimizers import average_of
from jaxdp_episodic.trainer.run import checks
from jaxdp_episodic.trainer.run.checks import found_in_both
from jaxdp_episodic.trainer.run.evaluation import PrivateValidation
from jaxdp_episodic.trainer.run.ledger import RunMismatchError
from jaxdp_episodic.trainer.run.store import EPOCH, GROUPS, RunStore
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics


class TrainingState(NamedTuple):
    """What changes from step to step; all of it follows from releases."""

    params: Any  # pytree of float arrays
    optimizer_state: Any  # of the optax optimizer
    start: Any = ()  # the private statistics released so far; () without any
    # Of the next step, float32, if it follows a quantile; else ().
    clip_norm: Any = ()
    # Of an adaptive run, a row for each noisy score: ``release`` (its number; 0: none
    # yet), ``check`` (index of the option), ``value``; else ().
    scores: Any = ()


def released_params(state: TrainingState) -> Any:
    """Returns the parameters to evaluate and release: the last, or their average."""
    model = average_of(state.params, state.optimizer_state)
    if not state.start:
        return model
    return {"start": state.start.released(), "model": model}


def array_types(state: Any) -> dict[str, str]:
    """Returns types and shapes of a state's arrays, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype} {tuple(leaf.shape)}"
        for path, leaf in leaves
    }


@functools.lru_cache(maxsize=8)  # a run that is resumed or repeated compiles nothing
def compiled_update(optimizer: optax.GradientTransformation) -> Any:
    """Returns the program (params, state, gradient, noise) -> (params, state)."""
    optimizer = optax.with_extra_args_support(optimizer)

    @jax.jit
    def moved(
        params: Any, kept: Any, gradient: Any, noise_deviation: Any
    ) -> tuple[Any, Any]:
        # Optax mixes types: a caller's setting of strict promotion must not reach it.
        with jax.numpy_dtype_promotion("standard"):
            updates, kept = optimizer.update(
                gradient, kept, params, noise_deviation=noise_deviation
            )
            return optax.apply_updates(params, updates), kept

    return moved


# --- Draws ---


class DrawSecret(NamedTuple):
    """What determines the draw of one step."""

    key: bytes  # of the generator of this draw, used for nothing else
    # Who takes part in the step, for sampling in epochs; else None.
    members: np.ndarray | None
    turn: int  # gradient steps charged before


class PreparedStep(NamedTuple):
    """Draw and noise of one step, made ahead by another thread for it alone."""

    step: int  # number of the step
    blocks: list[episode.Block]  # of its draw
    noise: Any  # for the sum; None except in the first process
    complete: int  # number of complete contributions in the draw, over all processes


class RunDraws:
    """The secrets that determine a run's draws.

    A private run makes a fresh key for each draw and writes none of them. Two secrets
    outlive a step and are kept in the run's file for `resume`:

    * for sampling in epochs (random allocation, shuffling), who takes part in which
      step of the running epoch; it is erased after the epoch's last step;
    * for correlated noise ("bands"), the key by which units are assigned to groups at
      random; it is erased at the end of the run.

    ``first`` and ``last`` are the first and the last gradient step. ``turn`` returns
    how many gradient steps were charged before a step.
    """

    def __init__(
        self,
        sampler: Any,  # an `EpisodeSampler` or a `GroupSampler`
        keys: Keys,
        processes: Processes,
        first: int,
        last: float = math.inf,
        turn: Callable[[int], int] = lambda step: 0,
    ) -> None:
        self._sampler, self._keys, self._processes = sampler, keys, processes
        self._first, self._last, self._turn = first, last, turn  # steps
        is_grouped = isinstance(sampler, GroupSampler)
        # Key of the group assignment, and the key by which the sampler has assigned.
        self._group_key = keys.new("groups", 0) if is_grouped else b""
        self._assigned_by, self._are_groups_written = b"", not is_grouped
        self._lost = ""  # which secret of a begun epoch, or run, is not in the file
        self._length = sampler.steps_per_epoch
        # By number: the running and the next one.
        self._epochs: dict[int, list[np.ndarray]] = {}
        self._written_epoch: int | None = None  # number of the epoch in the file

    def secret(self, step: int) -> DrawSecret:
        """Returns what a step's draw follows from: a new key, the same everywhere."""
        if self._lost:  # in another draw a unit could take part twice
            raise FileNotFoundError(self._lost)
        key, members = b"", None
        if self._processes.is_first:
            key = self._keys.new("draw", step)
            if self._length is not None:
                number, index = divmod(step - self._first, self._length)
                members = self._epoch(number)[index]
        self._processes.meet()  # the first process may be evaluating, or have failed
        keys = self._processes.shared_bytes(key + self._group_key)
        self._assign_groups(keys[KEY_BYTES:])
        if self._length is not None and self._processes.count > 1:
            file = io.BytesIO()
            if members is not None:
                np.save(file, members)
            sent = self._processes.shared_bytes(file.getvalue())
            members = np.load(io.BytesIO(sent))
        return DrawSecret(keys[:KEY_BYTES], members, self._turn(step))

    def _assign_groups(self, key: bytes) -> None:
        """Assigns the units to groups by this key, unless that is done."""
        if key != self._assigned_by and isinstance(self._sampler, GroupSampler):
            self._sampler.deal(generator(key))
            self._assigned_by = key

    def draw(self, secret: DrawSecret) -> Draw:
        """Returns the draw that a secret determines; safe in any thread."""
        turn = (secret.turn,) if isinstance(self._sampler, GroupSampler) else ()
        return self._sampler.draw(generator(secret.key), secret.members, *turn)

    def write_secrets(self, store: RunStore, step: int) -> None:
        """Writes the groups and this step's epoch to the run's file, if they are new.

        It is called before the step is charged. OSError: they could not be written.
        """
        if self._lost:
            raise FileNotFoundError(self._lost)
        if not self._are_groups_written:
            self._assign_groups(self._group_key)
            dealt = self._group_key, self._sampler.dealt
            store.keep(GROUPS, 0, [np.frombuffer(one, np.uint8) for one in dealt])
            self._are_groups_written = True
        if self._length is None or step < self._first:
            return
        number = (step - self._first) // self._length
        if self._written_epoch == number:
            return
        epoch = self._epoch(number)
        for old in [n for n in self._epochs if n < number]:
            del self._epochs[old]
        file = io.BytesIO()
        lengths = np.array([len(rows) for rows in epoch])
        np.savez(file, lengths=lengths, units=np.concatenate(epoch))
        store.keep(EPOCH, number, [np.frombuffer(file.getvalue(), np.uint8)])
        self._written_epoch = number

    def erase_secrets(
        self, store: RunStore, step: int, *, is_over: bool = False
    ) -> None:
        """Erases the epoch after its last step, and the groups after the run's."""
        if (is_over or step >= self._last) and self._group_key:
            store.forget(GROUPS)
        if self._length is None or step < self._first:
            return
        if step >= self._last or (step - self._first + 1) % self._length == 0:
            store.forget(EPOCH)
            self._written_epoch = None

    def read_secrets(self, store: RunStore, step: int) -> None:
        """Reads the secrets of a resumed run, whose next step is ``step``."""
        if self._epochs or self._assigned_by:  # what was prepared would not fit
            raise ValueError("resume must come before a draw: make a new trainer")
        found = store.kept(GROUPS)
        if found is not None:
            self._group_key, dealt = (one.tobytes() for one in found[1])
            self._assign_groups(self._group_key)
            self._are_groups_written = True
            if self._sampler.dealt != dealt:
                raise RunMismatchError(
                    "this version of NumPy or randomgen assigns units to other groups "
                    f"than the run did: resume with the versions that {store.path} "
                    "names (jaxdp-episodic log)"
                )
        if self._keys.is_seeded:
            if self._group_key:
                warnings.warn(
                    "a resumed run with bands differs from an uninterrupted run with "
                    "the same seed: the correlation of its noise starts again",
                    stacklevel=4,
                )
            return
        if found is None and self._group_key and step > self._first:
            self._lost = (
                f"{store.path} has no groups any more (lost, or erased at the end of "
                "the run): a run with bands cannot go on without them"
            )
        if self._length is None or step < self._first:
            return
        number, index = divmod(step - self._first, self._length)
        if index == 0:
            return  # the epoch has not begun: it is drawn when it does
        kept = store.kept(EPOCH)
        if kept is None or kept[0] != number:
            self._lost = (
                f"{store.path} no longer has epoch {number + 1}, which has begun: "
                "without its secret allocation the run cannot go on"
            )
            return
        file = io.BytesIO(kept[1][0].tobytes())
        with np.load(file, allow_pickle=False) as found:
            ends = np.cumsum(found["lengths"])[:-1]
            self._epochs[number] = np.split(found["units"], ends)
        self._written_epoch = number

    def _epoch(self, number: int) -> list[np.ndarray]:
        if number not in self._epochs:
            self._assign_groups(self._group_key)
            key = self._keys.new("epoch", number)
            self._epochs[number] = self._sampler.begin_epoch(generator(key))
        return self._epochs[number]


# --- Mechanisms ---

# Examples whose clipped gradients one vectorized call computes; episodes: one a call.
_EXAMPLES_AT_ONCE = 64
# Most noisy scores in a run's state.
_MOST_SCORES = 100_000


@dataclass(frozen=True)
class SharedParts:
    """What all mechanisms of a run have in common; see `Trainer` for the fields."""

    learner: Any
    params: Any
    data: ExampleTable
    shots: int
    optimizer: optax.GradientTransformation
    l2_clip_norm: float
    normalizer: float | None
    block_size: int | None
    devices: Sequence[Any]
    clipping: ClippingConfig | None
    noise: str
    start: PrivateStatistics | None
    keys: Keys
    processes: Processes
    turn: Callable[[int], int]  # number of gradient steps charged before a step


class Mechanism:
    """What mechanisms have in common."""

    shared_fields: tuple[str, ...] = ()  # of the state; other processes receive them
    # Whether all processes release together; else the first one does.
    is_joint = False

    def as_release(self, state: TrainingState, arrays: list[np.ndarray]) -> Any:
        """Returns a release made of its arrays in the run's file; here it is one."""
        return arrays[0]


class GradientStep(Mechanism):
    """A clipped and noised gradient step, with its sampler and functions."""

    shared_fields, is_joint = ("params", "clip_norm"), True

    def __init__(self, parts: SharedParts, budget: PrivacyBudget) -> None:
        step, data, learner, start = budget.step, parts.data, parts.learner, parts.start
        checks.check_data(step, data)
        checks.check_targets(learner, data, step)
        checks.check_start(budget, start, parts.noise, data)
        checks.warn_about_delta(step, budget.delta, data)
        self._parts = parts
        self.sampler = sampler = checks.sampler_of(step, data)
        loss = episode.contribution_loss(learner, sampler.slot_shape, shots=parts.shots)
        couples = getattr(learner, "couples_examples", True)
        self.needs = Needs.of(parts.shots, learner.is_regression, couples)
        self.complete_units = checks.checked_contributions(sampler, self.needs, budget)
        seen = data.features  # by the model; or what the statistics project
        shape, dtype = seen.shape[1:], seen.dtype
        if start is not None:
            shape, dtype = (start.dimensions,), np.dtype(np.float32)
        inputs = jax.ShapeDtypeStruct((1, *shape), dtype)
        checks.check_outputs(learner, parts.params, inputs, sampler.slot_shape)
        normalizer = parts.normalizer
        if normalizer is None and not budget.takes_steps:
            normalizer = 1.0  # divides nothing
        self.normalizer = checks.public_normalizer(normalizer, step, sampler)
        clipping = checks.checked_clipping(
            parts.clipping, self.normalizer, budget, sampler
        )
        self._is_taken = budget.takes_steps
        first, self._bands, coefficients = len(budget.before) + 1, step.bands, None
        if step.bands is not None:
            number = max(budget.num_steps - len(budget.before), 1)
            bands = step.bands.count, number, step.bands.horizon
            coefficients = band_coefficients(*bands).tolist()
        self.gradient = PrivateGradient(
            loss,
            clipping=clipping,
            devices=list(parts.devices),
            units_at_once=1 if couples else _EXAMPLES_AT_ONCE,
            noise=parts.noise,
            coefficients=coefficients,
        )
        number = len(parts.devices) * parts.processes.count
        rows = checks.rows_a_device(parts.block_size, sampler, number, parts.noise)
        self._block_size = rows * len(parts.devices)
        self.noise_multiplier = self.gradient.checked_noise(step.noise_multiplier)
        self._deviation = self.noise_multiplier * longest(clipping) / self.normalizer
        self._bounds = clipping.bounds(parts.l2_clip_norm)
        self._update = compiled_update(parts.optimizer)
        ends = first, budget.num_steps
        self.draws = RunDraws(sampler, parts.keys, parts.processes, *ends, parts.turn)

    def initial_state(self, budget: PrivacyBudget | AdaptiveBudget) -> TrainingState:
        """Returns the state before the first step of a run."""
        parts = self._parts
        dtype = training_dtype(parts.params)

        def widened(leaf: Any) -> Any:
            is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
            return leaf.astype(dtype) if is_float else leaf

        scores: Any = ()
        if isinstance(budget, AdaptiveBudget):
            most = sum(budget.most(name) for name in budget.checks)
            _validation.whole_number("scores", most, minimum=0, maximum=_MOST_SCORES)
            kinds = {"release": np.int32, "check": np.int32, "value": np.float32}
            scores = {name: np.zeros(max(most, 1), kinds[name]) for name in kinds}
        kept = parts.optimizer.init(jax.tree.map(widened, parts.params))
        norm, counts = jnp.float32(parts.l2_clip_norm), self.gradient.clipping.counts
        return TrainingState(
            parts.params,
            jax.tree.map(jnp.asarray, kept),
            () if parts.start is None else parts.start.initial(),
            norm if counts else (),
            scores,
        )

    def prepared(
        self, state: TrainingState, number: int, secret: DrawSecret
    ) -> PreparedStep:
        """Returns a step's draw and noise; neither depends on the parameters."""
        noise = None
        if self._parts.processes.is_first:
            key = self._parts.keys.new("noise", number)
            noise = self.gradient.noise(state.params, key, self.noise_multiplier)
        draw = self.draws.draw(secret)
        complete = self.sampler.complete_in(draw, self.needs)
        return PreparedStep(number, self.blocks(state, draw), noise, complete)

    def blocks(self, state: TrainingState, draw: Draw) -> list[episode.Block]:
        """Returns the blocks of a draw; one process of several gets its share."""
        parts = self._parts
        made = episode.make_blocks(
            draw,
            parts.data if parts.start is None else parts.start.table(state.start),
            block_size=self._block_size,
            num_shards=len(parts.devices),
            share=(parts.processes.index, parts.processes.count),
        )
        return list(made)

    def release(
        self, state: TrainingState, number: int, prepared: PreparedStep | None
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the noised gradient, in the first process, and diagnostics."""
        if prepared is None:
            prepared = self.prepared(state, number, self.draws.secret(number))
        released, private = self.gradient(
            state.params,
            prepared.blocks,
            prepared.noise,
            l2_clip_norm=self.clip_norm(state),
            noise_multiplier=self.noise_multiplier,
            normalizer=self.normalizer,
        )
        return released, {**private, "num_complete": prepared.complete}

    def try_out(self, state: TrainingState) -> TrainingState:
        """Takes a step on zeros."""
        if not self._is_taken:
            return state
        parts, shape = self._parts, self.sampler.slot_shape
        seen = None if parts.start is None else parts.start.dimensions
        released = self.gradient.try_out(
            state.params,
            episode.zero_block(parts.data, shape, self._block_size, seen),
            l2_clip_norm=self.clip_norm(state),
            normalizer=self.normalizer,
        )
        return state if released is None else self.apply(state, 0, released)

    def clip_norm(self, state: TrainingState) -> float:
        """The clip norm of the next step."""
        norm = state.clip_norm
        return self._parts.l2_clip_norm if isinstance(norm, tuple) else float(norm)

    def apply(self, state: TrainingState, number: int, released: Any) -> TrainingState:
        """The state after a release, of which the optimizer sees the gradient."""
        gradient = released = self.gradient.on_devices(released)
        clipping, norm, rise = self.gradient.clipping, self.clip_norm(state), 1.0
        if isinstance(released, Released):
            gradient = released.gradient
            rise = 1.0 if released.rise is None else float(released.rise)
        deviation = self._deviation * norm * rise
        params, kept = self._update(
            state.params, state.optimizer_state, gradient, deviation
        )
        # Unchanged statistics stay the same object: see `PrivateStatistics.table`.
        state = state._replace(params=params, optimizer_state=kept)
        if not clipping.counts:
            return state
        norm = next_clip_norm(clipping, self._bounds, norm, float(released.share))
        return state._replace(clip_norm=jnp.float32(norm))

    def as_release(self, state: TrainingState, arrays: list[np.ndarray]) -> Any:
        """A gradient like the parameters, and what is released with it."""
        like = state.params  # a resumed run has a state of the same kinds
        counts, rises = self.gradient.clipping.counts, self._bands is not None
        if counts or rises:
            like = Released(like, 0.0 if counts else None, 0.0 if rises else None)
        return jax.tree.unflatten(jax.tree.structure(like), arrays)


@dataclass(frozen=True)
class Statistic(Mechanism):
    """A private statistic of all the data, released once."""

    parts: SharedParts
    statistics: Any  # the run's `PrivateStatistics`
    index: int  # among them
    noise_multiplier: float
    shared_fields = ("start",)

    def release(self, state: TrainingState, number: int, prepared: Any) -> Any:
        """Returns the noised sum; there are no diagnostics."""
        keys, noise = self.parts.keys, self.noise_multiplier
        pairs, key = generator(keys.new("draw", number)), keys.new("noise", number)
        found = self.statistics.noised_sum(state.start, self.index, pairs, key, noise)
        return found, {}

    def try_out(self, state: TrainingState) -> TrainingState:
        """Computes it for one example of zeros."""
        # Without noise zeros have no covariance to whiten by.
        noisy = replace(self, noise_multiplier=self.noise_multiplier or 1.0)
        zeros = self.statistics.sum_of_zeros(state.start, self.index)
        return noisy.apply(state, 0, zeros)

    def apply(self, state: TrainingState, number: int, released: Any) -> TrainingState:
        """The state after a release."""
        start, noise = state.start, self.noise_multiplier
        after = self.statistics.with_sum(start, self.index, released, noise)
        return state._replace(start=after)


@dataclass(frozen=True)
class NoisyCheck(Mechanism):
    """A noisy score on held-out data."""

    parts: SharedParts
    index: int  # among the checks
    check: PrivateValidation
    judged: Any  # the learner that is scored

    def release(self, state: TrainingState, number: int, prepared: Any) -> Any:
        """Returns the noised score; there are no diagnostics."""
        params, keys = released_params(state), self.parts.keys
        return self.check.release(self.judged, params, keys, number), {}

    def try_out(self, state: TrainingState) -> TrainingState:
        """Scores a block of zeros."""
        if self.parts.processes.is_first:
            self.check.try_out(self.judged, released_params(state))
        return state

    def apply(self, state: TrainingState, number: int, released: Any) -> TrainingState:
        """The state after a release."""
        scores = {key: np.array(column) for key, column in state.scores.items()}
        place = int(np.count_nonzero(scores["release"]))
        scores["release"][place] = number
        scores["check"][place] = self.index
        scores["value"][place] = released
        return state._replace(scores=scores)


def mechanisms_of(
    parts: SharedParts,
    budget: PrivacyBudget | AdaptiveBudget,
    checked: Mapping[str, PrivateValidation],
) -> dict[str, Any]:
    """Returns the mechanism of each kind of step, by its name in the run's file."""
    statistics = [
        Statistic(parts, parts.start, index, float(step.noise_multiplier))
        for index, step in enumerate(budget.before)
    ]
    if isinstance(budget, PrivacyBudget):
        made = [*statistics, GradientStep(parts, budget)]
        return {f"phase {i + 1}": mechanism for i, mechanism in enumerate(made)}
    found: dict[str, Any] = {}
    most = budget.num_steps
    for name in budget.training:  # an option is checked as a plan of its own
        plan = budget.options[name], budget.epsilon, budget.delta, most, most
        found[name] = GradientStep(parts, PrivacyBudget(*plan, before=budget.before))
    found |= dict(zip(budget.first, statistics, strict=True))
    start, learner = parts.start, parts.learner
    judged = learner if start is None else start.learner(learner)
    check_checks(budget, checked, judged, parts)
    for index, (name, check) in enumerate(checked.items()):
        found[name] = NoisyCheck(parts, index, check, judged)
    return found


def check_checks(
    budget: AdaptiveBudget,
    checked: Mapping[str, PrivateValidation],
    judged: Any,
    parts: SharedParts,
) -> None:
    """Refuses validations that are not those of the budget."""
    if set(checked) != set(budget.checks):
        raise ValueError(
            f"checks must be given for the budget's {sorted(budget.checks)}, got "
            f"{sorted(checked)}"
        )
    for name, one in checked.items():
        what = f"check {name!r}"
        _validation.instance(what, one, PrivateValidation, "a PrivateValidation")
        if one.step != budget.options[name]:
            raise ValueError(
                f"check {name!r} must have the step of the budget's option, got "
                f"{one.step} against {budget.options[name]}"
            )
        if one.noise != parts.noise:
            raise ValueError(
                f"check {name!r} must have noise={parts.noise!r} as the run has, "
                f"got {one.noise!r}"
            )
        one.check_learner(judged)
        checks.warn_about_delta(one.step, budget.delta, one.data)
        if len(budget.runs) > 1:
            check_apart(name, one, parts.data)


def check_apart(name: str, check: PrivateValidation, data: ExampleTable) -> None:
    """Refuses held-out data that share a protected unit with the training data.

    They are accounted apart: the unit would be charged for one of the two parts only.
    """
    found, by_chance = found_in_both(check.data, data, check.step)
    if found:
        raise ValueError(
            f"check {name!r} must be apart from the training data, got {found}: put "
            "its option into one run with those that train"
        )
    if by_chance:
        warnings.warn(
            f"check {name!r} is apart from the training data, but has {by_chance}: by "
            "chance; if not, one person's example is in both parts and charged in one "
            "only",
            stacklevel=4,
        )
