"""Solves settings by contour integrals, with as many nodes as the error requires."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant._engine import (
    Chunks,
    Kernel,
    choose_engine,
    engine_name,
    in_chunks,
    jitted,
    on_jax,
    using_choice,
)
from jaxdp_episodic.accountant.methods.exact.contour import (
    FALL,
    exchanged_is_less,
    first_epsilon,
    lay_contour,
)
from jaxdp_episodic.accountant.methods.exact.integral import Blocks, search
from jaxdp_episodic.accountant.methods.exact.mgf import (
    NEAR_LOSS,
    bulk_of,
    steps_of,
)
from jaxdp_episodic.accountant.methods.rdp import bounding_few, rdp_bound
from jaxdp_episodic.accountant.methods.run import (
    DeltaAt,
    EpsilonAt,
    Group,
    Question,
    Run,
)
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    map_arrays,
    namespace,
    where_needed,
)

# Of one pass; a chunk of it takes JAX as long as NumPy some five settings.
KERNEL = Kernel("exact", numpy_seconds=2e-3, compile_seconds=10.0, least=16)
# Largest relative error estimate of an answer that is called exact.
TOLERANCE = 1e-6
# Nats below delta at which loss distributions are truncated. With a lower value rare
# large losses keep the contour nearer to 0, where more of the integrand cancels.
CUT = 50.0
# Nats by which the truncated probability must be below delta.
CUT_MARGIN = 30.0
# Settings in a chunk. JAX compiles the pass for one size on each kind of device.
_CHUNKS = Chunks(numpy=8, cpu=(64,), accelerator=(4096,))
# Nodes of a loss distribution in JAX's passes.
_LOSS_NODES = 112
# Nodes of the contour in a block of JAX's passes.
_BLOCK = 32
# Largest number of such blocks.
_MOST_BLOCKS = 32
# Passes with more nodes of a loss distribution run on NumPy; few settings need them.
_MOST_LOSS_NODES = 144
# Number of settings with far losses that NumPy computes: their program takes 10 s to
# compile, and each of them 5 ms on NumPy.
_FEW_FAR = 64
# JAX compiles for numbers of mixture terms that are powers of this.
_TERMS_BASE = 4
# Nats of log(delta) between the epsilon of the contour and the answer above which the
# error may exceed its estimate.
NEAR = 3.0
# The same, above which the error is unknown.
_FAR = 10.0
# Largest ratio of the epsilon of the contour to the answer.
LARGEST_RATIO = 2.0
# Error of log(delta), in nats, above which an answer is not used as the next guess.
USELESS = 0.5
# Error of log(delta), in nats, above which an answer does not even say whether the last
# guess was too large.
_NO_SIGN = 10.0


class Pass(NamedTuple):
    """Numbers of nodes of a loss distribution and of the contour, and its end."""

    loss_nodes: int
    contour_nodes: int
    fall: float = FALL  # nats; see `contour.lay_contour`


# Tried one after another while the error of a setting is too large. Hard settings need
# more nodes of the contour, hardly ever of the losses. Nine in ten settings need the
# first pass only.
PASSES = (
    Pass(112, 97, 24.0),
    Pass(128, 177, 34.0),
    Pass(144, 449),
    Pass(192, 1025),
    Pass(384, 1025),
)
# Enough nodes to compare delta with its target.
COMPARISON = Pass(112, 21, 14.0)
# An answer is final if its error is at most this share of `TOLERANCE`: the errors of
# both directions may add up.
SETTLED = 0.5
# A pass is skipped if it has less than this share of the nodes expected to be needed.
_HOPEFUL_SHARE = 0.8


@dataclass
class ContourSolver:
    """Solves a batch of (n,) settings by contour integrals, in either direction."""

    question: Question
    run: Run  # truncated
    bound: np.ndarray  # the Rényi bound; epsilon's may be inf before the first pass
    order: np.ndarray  # the order of that bound
    goal: np.ndarray  # log(delta), or a guess: distributions are truncated below it
    log_added: np.ndarray  # logarithm of the delta of the terms left out of the run
    # Where a Rényi bound says that delta is less backward, at the forward epsilon.
    backward_is_less: np.ndarray = field(init=False)
    # Where parts of a distribution may lie so far apart that their phases matter. Once
    # true it stays true, so that all passes use one program.
    is_far: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.backward_is_less, self.is_far = np.zeros((2, *self.bound.shape), bool)

    def surely_private(self, asked: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
        """Where backward delta at that epsilon plus its error is below the target."""
        log_delta, error = self._compared(asked, epsilon, backward=True)
        return log_delta + error < self.question.target

    def _compared(
        self, asked: np.ndarray, epsilon: np.ndarray, *, backward: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """log(delta) at an epsilon > 0 by few nodes and its error, else NaN and inf."""
        value, error = np.full(epsilon.shape, np.nan), np.full(epsilon.shape, np.inf)
        index = np.flatnonzero(asked & (epsilon > 0))
        if index.size:
            value[index], log_error, *_ = self._pass(
                DeltaAt(epsilon[index]), index, epsilon[index], COMPARISON, backward
            )
            # An error estimate of a nat or more is not reliable.
            error[index] = np.where(log_error < 1, log_error, np.inf)
        return value, error

    def solve(
        self, wanted: np.ndarray, *, backward: bool, least: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Values and errors of one direction, by as many passes as necessary.

        Settings whose answer is surely below ``least`` are not refined.
        """
        shape = self.bound.shape
        value, error = np.full(shape, np.nan), np.full(shape, np.inf)
        guess = self.question.guess if isinstance(self.question, EpsilonAt) else None
        guess = guess if least is None else least
        initial = np.full(shape, -1.0)  # negative: the kernel guesses
        if not self.question.is_epsilon:
            initial = self.question.target
        elif guess is not None:
            initial = np.clip(guess, 0.0, self.bound)
        least = np.full(shape, -np.inf) if least is None else least
        far = np.zeros(shape, bool)
        # Number of nodes needed, by the last error: twice as many nodes square it.
        expected = np.zeros(shape)
        # Backward, few settings are left after the comparison.
        skipped = self.question.is_epsilon and backward
        for effort in PASSES[skipped:]:
            scale = self.question.scale(value)
            settled = error <= SETTLED * TOLERANCE * scale
            # The other direction's answer is larger.
            settled |= value + error <= least
            least_nodes = np.minimum(
                _HOPEFUL_SHARE * expected, PASSES[-1].contour_nodes
            )
            hopeful = far | (least_nodes <= effort.contour_nodes)
            index = np.flatnonzero(wanted & ~settled & hopeful)
            if index.size == 0:
                continue
            question = self.question.take(index)
            found = self._pass(question, index, initial[index], effort, backward)
            new_value, new_error, *_ = found
            if question.is_epsilon:
                judged = self._judged(index, initial[index] < 0, found)
                new_value, new_error, far[index], initial[index] = judged
            else:
                # A delta this small may be due to truncation.
                lost = new_value < self.goal[index] - CUT + CUT_MARGIN
                new_error = np.where(lost, np.inf, new_error)
            new_error = np.where(far[index] | np.isnan(new_error), np.inf, new_error)
            size = question.scale(new_value)
            expected[index] = effort.contour_nodes * _growth(new_error / size)
            better = ~(new_error > error[index])
            value[index] = np.where(better, new_value, value[index])
            error[index] = np.where(better, new_error, error[index])
            if not question.is_epsilon:
                # With a higher cut less of the integrand cancels.
                known = np.isfinite(value) & (error < 0.1)
                self.goal = np.where(known, value - 1.0, self.goal)
        return value, error

    def _judged(
        self, index: np.ndarray, are_first: np.ndarray, found: tuple[np.ndarray, ...]
    ) -> tuple[np.ndarray, ...]:
        """Epsilons of a pass, errors, whether contours lay too far, the next epsilons.

        Keeps the Rényi bounds of the pass; ``are_first``: of contours by a first guess.
        """
        value, log_error, slope, used, bound, order, less = found
        self.bound[index], self.order[index] = bound, order
        self.backward_is_less[index] = less > 0
        # The bound of a first guess that failed is at orders below
        # `contour.largest_center`, and may be far too large.
        failed = np.any(are_first) & ~(log_error < USELESS) & (bound > 0)
        if np.any(failed):
            poor = index[failed]
            asked = self.question.take(poor), self.run.take(poor)
            with bounding_few(poor.size):
                self.bound[poor], self.order[poor] = rdp_bound(*asked, loose=True)
        value, error, far, closer = judged_epsilon(value, log_error, slope, used)
        # Even a poor answer helps to place the next contour. NaN: nothing is known.
        bound = self.bound[index]
        closer = np.maximum(np.fmin(closer, bound), 0.0)
        nothing = bound == 0  # epsilon is 0 without a contour
        value, error = np.where(nothing, 0.0, (value, error))
        return value, error, far & ~nothing, closer

    def _pass(
        self,
        question: Question,
        index: np.ndarray,
        initial: np.ndarray,
        effort: Pass,
        backward: bool,
    ) -> tuple[np.ndarray, ...]:
        """Results of `one_pass` for some settings, with the terms left out added."""
        part = self.run.take(index)
        log_target, added = question.target, self.log_added[index]
        if question.is_epsilon:
            # The target is lowered by the delta of the terms that were left out.
            added = np.minimum(added - log_target, -1e-12)
            log_target = log_target + np.log1p(-np.exp(added))
        arrays = (
            log_target,
            initial,
            self.bound[index],
            self.order[index],
            # The truncated probability of all steps together is far below delta.
            np.minimum(self.goal[index], 0.0)
            - np.log(np.maximum(part.num_steps, 1.0))
            - CUT,
            np.full(index.shape, float(backward)),
        )
        groups = part.groups()
        self.is_far[index] |= _have_far_losses(groups, arrays[4])
        kinds = question.is_epsilon, self.is_far[index]
        value, error, *rest = _by_terms(arrays, groups, effort, *kinds)
        with np.errstate(invalid="ignore"):  # NaN: not found with these nodes
            if not question.is_epsilon:
                value = np.logaddexp(value, added)
                added = np.where(np.isneginf(added), added, added - value)
            # The terms left out may be 0. An epsilon of 0 is exact without them.
            counts = (error != 0) & ~np.isneginf(added)
            error = error + np.where(counts, np.exp(np.minimum(added, 0.0)), 0.0)
        return (value, error, *rest)


def _by_terms(
    arrays: tuple[np.ndarray, ...],
    groups: tuple[Group, ...],
    effort: Pass,
    is_epsilon: bool,
    is_far: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """`one_pass` over chunks of settings with about equally many mixture terms."""
    terms, losses = np.ones(arrays[0].shape), [group.loss for group in groups]
    for loss in losses:
        terms = np.maximum(terms, loss.num_terms.max(axis=0))
    kinds = tuple((type(g.loss).__name__, len(g.count)) for g in groups)
    gaussians = tuple(bool(np.any(g.loss.gaussian_shift() > 0)) for g in groups)
    # Sorted, as the sums of a chunk are as long as its longest one.
    rows = np.argsort(terms, kind="stable")
    lengths = _TERMS_BASE ** np.ceil(np.log(terms[rows]) / math.log(_TERMS_BASE))
    result = np.empty((len(Found._fields), terms.size))
    for length, far in itertools.product(np.unique(lengths), (False, True)):
        some = rows[(lengths == length) & (is_far[rows] == far)]
        if not some.size:
            continue
        kernel = KERNEL._replace(what=(kinds, gaussians, length, far))
        few = effort.loss_nodes > _MOST_LOSS_NODES or (far and some.size <= _FEW_FAR)
        engine = "numpy" if few else choose_engine(some.size, kernel, losses)
        on_chunk = functools.partial(
            _on_chunk, effort, is_epsilon, int(length), gaussians, not far
        )
        chunk = map_arrays(lambda a, some=some: a[..., some], (arrays, groups))
        with using_choice(engine):
            result[:, some] = in_chunks(on_chunk, chunk, _CHUNKS)
    return tuple(result)


def _have_far_losses(groups: tuple[Group, ...], log_cut: np.ndarray) -> np.ndarray:
    """Where losses may be above `NEAR_LOSS`, (n,); true if unsure."""
    far = np.zeros(log_cut.shape, bool)
    for loss, count in groups:
        with np.errstate(all="ignore"):
            size = loss.largest_node(log_cut - np.log(loss.outer_rate))
        far |= ((count > 0) & ~(size <= NEAR_LOSS)).any(axis=0)
    return far


def _on_chunk(
    effort: Pass,
    is_epsilon: bool,
    length: int,
    gaussians: tuple[bool, ...],
    is_near: bool,
    chunk: Any,
) -> tuple[np.ndarray, ...]:
    """`one_pass` on either engine."""
    arrays, groups = chunk
    if engine_name() == "jax":
        number = max(round(effort.contour_nodes / _BLOCK), 1)
        terms = tuple(length if g.loss.num_terms.max() > 1 else 1 for g in groups)
        shape = Shape(_LOSS_NODES, terms, gaussians, is_near, _BLOCK, _MOST_BLOCKS)
        call = functools.partial(on_jax, jitted(one_pass, ("shape",)))
    else:
        number, terms = 1, tuple(int(g.loss.num_terms.max()) for g in groups)
        sizes = effort.contour_nodes, 1
        shape = Shape(effort.loss_nodes, terms, gaussians, is_near, *sizes)
        call: Any = one_pass
    with np.errstate(all="ignore"):
        held = float(not is_epsilon)
        return call(*arrays, groups, number, effort.fall, held, shape=shape)


class Shape(NamedTuple):
    """What a pass is compiled for."""

    loss_nodes: int
    terms: tuple[int, ...]  # number of mixture terms of each group; 1 for others
    has_gaussians: tuple[bool, ...]  # whether steps of a group may be Gaussian
    is_near: bool  # whether no losses have parts that may lie far apart
    block: int  # number of contour nodes in a block
    most: int  # largest number of blocks


class Found(NamedTuple):
    """Results of a pass; (n,) arrays."""

    value: Array  # epsilon, or log(delta)
    error: Array  # estimate of the error of log(delta), in nats
    slope: Array  # ``-d log(delta) / d epsilon``
    used: Array  # the epsilon of the contour
    bound: Array  # the Rényi bound of epsilon
    order: Array  # the order of that bound
    backward_is_less: Array  # 1 where delta is known to be less backward, else 0


def one_pass(
    target: Array,
    initial: Array,
    bound: Array,
    order: Array,
    log_cut: Array,
    backward: Array,
    groups: tuple[Group, ...],
    number: Array | int,
    fall: Array | float,
    is_held: Array | float,
    *,
    shape: Shape,
) -> Found:
    """One pass over (n,) settings: lays a contour for each and integrates along it.

    Where ``initial`` is negative, a first epsilon is computed.
    """
    xp = namespace(target, groups[0].count)
    number = xp.asarray(number).astype(np.int32)
    steps = tuple(
        steps_of(
            group,
            backward,
            log_cut,
            num_nodes=shape.loss_nodes,
            num_terms=terms,
            has_gaussians=has_gaussians,
            is_near=shape.is_near,
        )
        for group, terms, has_gaussians in zip(
            groups, shape.terms, shape.has_gaussians, strict=True
        )
    )
    bulk = bulk_of(steps)
    known = initial >= 0
    initial, bound, order = where_needed(
        known,
        xp.array([initial, bound, order]),
        lambda: xp.array(first_epsilon(target, bound, groups, steps, bulk)),
    )
    contour = lay_contour(initial, steps, fall, bulk)
    blocks, held = Blocks(number, shape.block, shape.most), is_held > 0
    found = search(target, initial, bound, contour, steps, blocks, held)
    less = xp.zeros_like(target)
    if len(groups) == len(groups[0].count) == 1 and groups[0].loss.nodes_exchange:
        asked = target, found.value, order, steps[0]
        less = where_needed(
            known, less, lambda: xp.where(exchanged_is_less(*asked), 1.0, 0.0)
        )
    return Found(*found[:3], initial, bound, order, less)


def judged_epsilon(
    value: Array, log_error: Array, slope: Array, used: Array
) -> tuple[Array, ...]:
    """Epsilon, its error, whether the contour's epsilon was too far, the next guess."""
    # The contour of a larger epsilon ends where that integrand is negligible, and may
    # miss the contribution of small losses. Its answer is then only the next guess.
    xp = namespace(value, slope)
    value = xp.maximum(value, 0.0)
    # delta falls with epsilon: a sum that rises has not converged.
    falls = slope > 0
    error = xp.where(falls, log_error / xp.where(falls, slope, 1.0), xp.inf)
    # 0 is exact where delta is below its target there.
    error = xp.where(falls & (log_error == 0), 0.0, error)
    distance = xp.abs(value - used) * xp.abs(slope)
    error = xp.where(distance > NEAR, 10.0 * error, error)
    far = (distance > _FAR) | (used > LARGEST_RATIO * value)
    # If there is no answer, the guess was too large. A poor answer says little more.
    known = xp.isfinite(error) & ~xp.isnan(value)
    lowest = xp.where(log_error >= _NO_SIGN, 0.5 * used, 0.0)
    poor = xp.where(known, xp.clip(value, lowest, 2.0 * used), 0.5 * used)
    return value, error, far, xp.where(known & (log_error < USELESS), value, poor)


def _growth(error: np.ndarray) -> np.ndarray:
    """Factor by which the number of nodes must grow, by the relative error; or 0.

    0 if the error is small enough or too large to say.
    """
    # The error's logarithm is about proportional to the number of nodes.
    known = (error > SETTLED * TOLERANCE) & (error < 0.5)
    return np.where(
        known, math.log(SETTLED * TOLERANCE) / np.log(np.where(known, error, 0.1)), 0.0
    )
