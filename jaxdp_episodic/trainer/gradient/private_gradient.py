"""Clips, sums, adds noise and divides in one object, so that no step can be skipped.

    (sum over clip units of clip(g_unit, C) + N(0, (sigma C)^2 I)) / normalizer

Units are processed one after another, so memory does not grow with the batch. Several
devices share each block. The first process adds the noise once, after the sum over
blocks, devices and processes.

If the clip norm follows a quantile, a noised count of the contributions that were not
clipped is released with the gradient: see `clipping`.

Contributions are float32, or float64 if a parameter is: see `precision`. The host draws
and adds the noise: see `noise`, and `discrete_noise` for the default.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.config.training_parts import (
    DISCRETE,
    FIXED,
    NOISES,
    NORMALIZE,
    ClippingConfig,
)
from jaxdp_episodic.trainer.draw.generators import generator
from jaxdp_episodic.trainer.gradient import discrete_noise
from jaxdp_episodic.trainer.gradient.clipping import (
    clip_by_norm,
    longest,
    released_share,
    scale_to_norm,
    vote,
)
from jaxdp_episodic.trainer.gradient.noise import (
    BandMemory,
    Noise,
    checked_noise,
    drawn_noise,
)
from jaxdp_episodic.trainer.gradient.precision import as_trained, training_dtype
from jaxdp_episodic.trainer.gradient.processes import all_processes

_AXIS = "shard"


class Totals(NamedTuple):
    """Sums over the units so far; all except the first two are private diagnostics."""

    gradient: Any
    votes: Array
    loss: Array
    norm: Array
    clipped: Array
    not_finite: Array
    units: Array


class Released(NamedTuple):
    """What a step releases if its clip norm follows a quantile, or with bands."""

    gradient: Any  # pytree, noised
    # Noised share of contributions of norm at most C; float32 scalar, or None.
    share: Any = None
    rise: Any = None  # `BandMemory.rise`; float32 scalar, or None


class PrivateGradient:
    """The private gradient of a step: clipped contributions, summed, with noise.

    A call compiles once per shape of block. Clip norm, noise and divisor are traced, so
    changing them compiles nothing.

    Args:
      loss: ``loss(params, unit) -> scalar``, hashable; its gradient is the unit's
        contribution.
      devices: JAX devices that share each block; its number of rows must be a multiple
        of theirs. Default: the first local device.
      units_at_once: number of units whose gradients are computed together. 1 is fastest
        and smallest for episodes on a CPU; take 32 or more for single examples. With
        discrete noise it is always 1, so that no unit changes how another is rounded.
      noise: "discrete", hardened against attacks on low-order bits, or "gaussian".
      clipping: what is done to contributions; None: clipping to a fixed norm.
      coefficients: of correlated noise, the first one > 0; None: independent noise.
        With coefficients each call uses the sums of earlier calls, until `forget`.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: another noise, no device, no units at once, or coefficients that
        cannot be decoded.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Array],
        *,
        devices: Sequence[Any] | None = None,
        units_at_once: int = 1,
        noise: str = DISCRETE,
        clipping: ClippingConfig | None = None,
        coefficients: Sequence[float] | None = None,
    ) -> None:
        self._kind = _validation.choice("noise", noise, NOISES)
        self._is_discrete = noise == DISCRETE
        kinds, words = ClippingConfig | None, "a ClippingConfig"
        _validation.instance("clipping", clipping, kinds, words)
        self.clipping = clipping or ClippingConfig(kind=FIXED)
        self._bands = None
        if coefficients is not None:
            self._bands = BandMemory(coefficients, is_discrete=self._is_discrete)
        self._longer = 1.0 if self._bands is None else self._bands.norm
        self._processes = all_processes()
        chosen = jax.local_devices()[:1] if devices is None else list(devices)
        _validation.whole_number("the number of devices", len(chosen))
        for one in chosen:
            _validation.instance("devices", one, jax.Device, "JAX devices")
        self._mesh = Mesh(np.array(chosen), (_AXIS,))
        self._by_row = NamedSharding(self._mesh, PartitionSpec(_AXIS))
        self._everywhere = NamedSharding(self._mesh, PartitionSpec())
        at_once = _validation.whole_number("units_at_once", units_at_once)
        normalizes = self.clipping.kind == NORMALIZE
        settings = 1 if self._is_discrete else at_once, self._is_discrete, normalizes
        self._add = _compiled_sum(loss, self._mesh, *settings)

    def on_devices(self, state: Any) -> Any:
        """Returns a pytree of arrays, copied to all participating devices."""
        return jax.device_put(state, self._everywhere)

    def noise(self, params: Any, key: bytes, noise_multiplier: float) -> Noise:
        """Returns the noise of one step, which does not depend on the data.

        It may be drawn ahead of time, also in another thread.

        Args:
          params: pytree of arrays, or of objects with their shapes.
          key: 32 secret bytes, used for nothing else.
          noise_multiplier: standard deviation of the noise divided by the largest norm
            that a clip unit can contribute: the clip norm, or slightly more if a count
            is released too. 0 (no privacy), or in [1e-18, 1e18]; at most 10^6 for
            discrete noise.

        Raises:
          TypeError: a key that is not bytes, or a multiplier that is not a number.
          ValueError: a key of another length, or a number out of range.
        """
        multiplier = self.checked_noise(noise_multiplier)
        steps = longest(self.clipping) * self._longer
        steps *= discrete_noise.GRID if self._is_discrete else 1
        shapes = self._shapes(params)
        sizes = [math.prod(shape) for shape in shapes]
        flat = drawn_noise(self._kind, steps * multiplier, sum(sizes), generator(key))
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        leaves = [part.reshape(s) for part, s in zip(parts, shapes, strict=True)]
        return Noise(self._kind, multiplier, leaves)

    def checked_noise(self, noise_multiplier: Any) -> float:
        """Returns a noise multiplier that this noise supports, or raises ValueError."""
        return checked_noise(noise_multiplier, self._kind, self._longer)

    def _shapes(self, params: Any) -> list[tuple[int, ...]]:
        """Returns the shapes of a release: the gradient's leaves, then any count."""
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(params)]
        return [*shapes, ()] if self.clipping.counts else shapes

    def deviation(self, noise_multiplier: float) -> float:
        """Returns the standard deviation of the next noise, in clip norms."""
        rise = 1.0 if self._bands is None else self._bands.rise
        return noise_multiplier * longest(self.clipping) * rise

    def forget(self) -> None:
        """Clears the memory of earlier calls (correlated noise)."""
        if self._bands is not None:
            self._bands.clear()

    def __call__(
        self,
        params: Any,
        blocks: Sequence[Any],
        noise: Noise | None,
        *,
        l2_clip_norm: float,
        noise_multiplier: float,
        normalizer: float,
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the noised gradient, and private diagnostics.

        With several processes all must call it, each with its own blocks; all except
        the first get ``(None, {})``.

        Args:
          params: pytree of float arrays.
          blocks: at least one; together their rows are the draw, see `make_blocks`. A
            block is a pytree of arrays (B, ...) with a field ``unit_mask`` (B,), > 0
            where a row holds a drawn unit. ``loss`` gets one row at a time; its float32
            and float64 arrays are cast to the training type. Masked rows after the last
            drawn row of a device's share cost nothing.
          noise: made by the method `noise`, for this call only. None in all processes
            except the first.
          l2_clip_norm: C, in [1e-18, 1e18]. It must not depend on the draw.
          noise_multiplier: the multiplier that the noise was drawn for.
          normalizer: public divisor of the gradient and the count, in [1e-18, 1e18].

        Returns:
          ``(gradient, diagnostics)``. The gradient has the structure of ``params``,
          float64 if one of them is, else float32; with a count or bands it is in a
          `Released`. The diagnostics are *private*: ``num_units``, ``mean_loss``,
          ``mean_norm`` (before clipping), ``share_clipped``, and ``num_not_finite``
          (units whose gradient was not finite and which contributed zero).

        Raises:
          TypeError: noise of another kind of object, or a setting that is not a number.
          ValueError: no block, rows that the devices cannot share equally, a number out
            of range, or noise that was used before or drawn for other settings.
        """
        _check_blocks(blocks, self._mesh.size)
        norm = _validation.float32_number("l2_clip_norm", l2_clip_norm)
        multiplier = self.checked_noise(noise_multiplier)
        divisor = _validation.float32_number("normalizer", normalizer)
        if self._is_discrete:
            rows = [len(block.unit_mask) for block in blocks]
            discrete_noise.check_rows(rows, self._processes.count)
        drawn = None
        if self._processes.is_first:
            words = "made by PrivateGradient.noise"
            own: Noise = _validation.instance("noise", noise, Noise, words)
            drawn = own.use(self._kind, multiplier, self._shapes(params))
        return self._noised(params, blocks, drawn, norm, divisor, self._bands)

    def try_out(
        self, params: Any, block: Any, *, l2_clip_norm: float, normalizer: float
    ) -> Any:
        """Returns what a call releases for zero data of a block's shapes; no noise."""
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), block)
        # One unit per device: without any unit the loss would not run.
        zeros.unit_mask[:: len(zeros.unit_mask) // self._mesh.size] = 1
        noise, kind = None, np.int64 if self._is_discrete else np.float64
        if self._processes.is_first:
            noise = [np.zeros(shape, kind) for shape in self._shapes(params)]
        return self._noised(params, [zeros], noise, l2_clip_norm, normalizer, None)[0]

    def _noised(
        self,
        params: Any,
        blocks: Sequence[Any],
        drawn: list[np.ndarray] | None,
        norm: float,
        divisor: float,
        bands: BandMemory | None,
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the result of a call, given the noise as arrays."""
        clip = np.asarray(norm, training_dtype(params))
        totals = self._sum(params, blocks, clip)
        if drawn is None:
            return None, {}
        share = rise = None
        if self._bands is not None:
            rise = np.asarray(self._bands.rise, np.float32)
        if self.clipping.counts:
            share = released_share(
                self.clipping,
                totals.votes,
                drawn.pop(),
                divisor,
                is_discrete=self._is_discrete,
                weight=1 if bands is None else bands.weight,
            )
        released = self._released(totals.gradient, drawn, float(clip), divisor, bands)
        leaves = [x.astype(clip.dtype) for x in released]
        tree = jax.tree.structure(params)
        gradient = self.on_devices(jax.tree.unflatten(tree, leaves))
        if share is not None or rise is not None:
            gradient = Released(gradient, share, rise)
        units = np.maximum(totals.units, 1.0)
        return gradient, {
            "num_units": totals.units,
            "mean_loss": totals.loss / units,
            "mean_norm": totals.norm / units,
            "share_clipped": totals.clipped / units,
            "num_not_finite": totals.not_finite,
        }

    def _sum(self, params: Any, blocks: Sequence[Any], clip: np.ndarray) -> Totals:
        """Returns the sums over all blocks; on the host in the first process."""
        params = self.on_devices(params)
        totals = self.on_devices(_zero_totals(params, self._is_discrete))
        for block in blocks:
            rows = jax.device_put(block, self._by_row)
            totals = self._add(params, totals, rows, clip)
        totals = self._processes.sum(totals)
        return jax.device_get(totals) if self._processes.is_first else totals

    def _released(
        self,
        total: Any,
        noise: list[np.ndarray],
        clip: float,
        divisor: float,
        bands: BandMemory | None,
    ) -> list[np.ndarray]:
        """Returns the noised sum, divided: float64 on the host, to be rounded once."""
        # Everything after adding the noise is post-processing.
        if self._is_discrete:
            steps = discrete_noise.steps_in_norm(*(leaf.size for leaf in noise))
            unit, sums = clip / steps / divisor, discrete_noise.whole_sum(total)
        else:
            unit = clip / divisor
            sums = [leaf / np.float64(clip) for leaf in jax.tree.leaves(total)]
        if bands is None:
            return [(x + n) * unit for x, n in zip(sums, noise, strict=True)]
        return [x * unit for x in bands.release(sums, noise)]

    def temporary_bytes(self, params: Any, block: Any) -> int:
        """Returns the working memory for a block on one device, in bytes.

        This is the compiler's plan, without parameters, block and sums.
        """
        totals = _zero_totals(params, self._is_discrete)
        clip = jnp.ones((), training_dtype(params))
        lowered = self._add.lower(params, totals, block, clip)
        analysis: Any = lowered.compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)


@functools.lru_cache(maxsize=8)  # a resumed or repeated run does not compile again
def _compiled_sum(*settings: Any) -> Any:
    return jax.jit(_summer(*settings), donate_argnums=1)


def _summer(
    loss: Callable[[Any, Any], Array],
    mesh: Mesh,
    units_at_once: int,
    is_discrete: bool,
    normalizes: bool,
) -> Callable[..., Totals]:
    """Returns the function that adds a block's clipped contributions to the totals."""

    def with_unit(params: Any, sums: Totals, unit: Any, clip: Array) -> Totals:
        """Returns the sums plus one unit; a unit that was not drawn adds nothing."""
        dtype = training_dtype(params)
        unit = as_trained(unit, dtype)
        value, contribution = jax.value_and_grad(loss)(params, unit)

        def added(sums: Totals, contribution: Any) -> Totals:
            if normalizes:
                clipped, norm, finite = scale_to_norm(contribution, clip)
            else:
                clipped, norm, finite = clip_by_norm(contribution, clip)
            if is_discrete:
                clipped = discrete_noise.on_grid(clipped, clip)
            new = Totals(
                clipped,
                vote(unit, norm, finite, clip),
                jnp.where(jnp.isfinite(value), value, 0.0),
                norm,
                norm > clip,
                ~finite,
                jnp.ones((), dtype),
            )
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, new)

        # The operand of a branch is in memory, so the measured norm is that of the very
        # numbers that are added. They are not recomputed with other rounding errors.
        drawn = unit.unit_mask > 0
        return jax.lax.cond(drawn, added, lambda sums, _: sums, sums, contribution)

    def share(params: Any, totals: Totals, block: Any, clip: Array) -> Totals:
        """Returns the totals plus one device's rows of the block."""
        # Each device needs its own copy, or gradients would be summed unclipped.
        params, bound = jax.lax.pcast((params, clip), _AXIS, to="varying")
        rows = len(block.unit_mask)
        at_once = min(units_at_once, rows)
        sum_dtype = jnp.int32 if is_discrete else training_dtype(params)
        places = jnp.arange(1, rows + 1, dtype=jnp.int32)
        last = jnp.max(jnp.where(block.unit_mask > 0, places, 0))

        start = jax.lax.pcast(_zeros_of(params, sum_dtype, jnp), _AXIS, to="varying")

        def add(i: Array, sums: Totals) -> Totals:
            if at_once == 1:
                unit = jax.tree.map(lambda a: a[i], block)
                return with_unit(params, sums, unit, bound)
            # The last slice is moved back to fit; units that it repeats are masked.
            first = jnp.minimum(i * at_once, rows - at_once)
            units = jax.tree.map(
                lambda a: jax.lax.dynamic_slice_in_dim(a, first, at_once), block
            )
            slots = jnp.arange(at_once, dtype=jnp.int32)
            fresh = first + slots >= i * at_once
            mask = units.unit_mask
            mask = jnp.where(fresh, mask, jnp.zeros_like(mask))
            units = units._replace(unit_mask=mask)
            each = jax.vmap(with_unit, in_axes=(None, None, 0, None))
            new = each(params, start, units, bound)
            return jax.tree.map(
                lambda a, b: a + jnp.sum(b, axis=0, dtype=b.dtype), sums, new
            )

        # The number of iterations is dynamic: rows after the last unit cost nothing.
        mine = jax.lax.fori_loop(0, -(-last // at_once), add, start)
        added = jax.lax.psum(mine, _AXIS)
        if is_discrete:
            added = added._replace(gradient=discrete_noise.halves(added.gradient))
        return jax.tree.map(jnp.add, totals, added)

    everywhere, by_row = PartitionSpec(), PartitionSpec(_AXIS)
    ins = everywhere, everywhere, by_row, everywhere
    return jax.shard_map(share, mesh=mesh, in_specs=ins, out_specs=everywhere)


def _zero_totals(params: Any, is_discrete: bool) -> Totals:
    totals = _zeros_of(params, training_dtype(params), np)
    if is_discrete:
        halves = jax.tree.map(lambda x: np.zeros((2, *x.shape), np.int32), params)
        totals = totals._replace(gradient=halves)
    return totals


def _zeros_of(params: Any, sum_dtype: Any, xp: Any) -> Totals:
    """Returns totals of zero, each in a buffer of its own because they are donated."""
    gradient = jax.tree.map(lambda leaf: xp.zeros(leaf.shape, sum_dtype), params)
    dtype = training_dtype(params)
    votes, *others = (xp.zeros((), kind) for kind in (np.int32, *[dtype] * 5))
    return Totals(gradient, votes, *others)


def _check_blocks(blocks: Sequence[Any], num_devices: int) -> None:
    if not blocks:
        raise ValueError("blocks must not be empty: an empty sample is a masked block")
    for block in blocks:
        rows = len(block.unit_mask)
        if rows == 0 or rows % num_devices:
            raise ValueError(
                f"rows of a block must be a positive multiple of the {num_devices} "
                f"device(s), got {rows}"
            )
