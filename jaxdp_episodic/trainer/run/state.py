"""The state of a run, which follows from what was released; its file is private."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp_episodic.files.json_file import differences
from jaxdp_episodic.trainer.gradient.precision import training_dtype
from jaxdp_episodic.trainer.learners.optimizers import average_of
from jaxdp_episodic.trainer.run.description import RunMismatchError


class TrainingState(NamedTuple):
    """What changes from step to step."""

    params: Any  # pytree of float arrays
    optimizer_state: Any  # of the optax optimizer
    start: Any = ()  # what the private statistics came to; () without
    # Of the next step, float32, where it follows a quantile; () elsewhere.
    clip_norm: Any = ()
    # Of a run that chooses, of each noisy score in turn: ``release`` (its number, 0
    # where there is none yet), ``check`` (index of the option), ``value``; else ().
    scores: Any = ()


def released_params(state: TrainingState) -> Any:
    """Returns the parameters to evaluate and release: the last, or their average."""
    model = average_of(state.params, state.optimizer_state)
    if not state.start:
        return model
    return {"start": state.start.released(), "model": model}


def initial_state(
    optimizer: optax.GradientTransformation,
    params: Any,
    start: Any = (),
    clip_norm: float | None = None,
) -> TrainingState:
    """Returns the state before the first step; without a clip norm it is constant."""
    dtype = training_dtype(params)

    def widened(leaf: Any) -> Any:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_float else leaf

    kept = optimizer.init(jax.tree.map(widened, params))
    first = () if clip_norm is None else jnp.asarray(clip_norm, jnp.float32)
    return TrainingState(params, as_arrays(kept), start, first)


def as_arrays(state: Any) -> Any:
    """The state with every leaf a JAX array."""
    return jax.tree.map(jnp.asarray, state)


def placed(
    on_devices: Callable[[Any], Any], before: TrainingState, after: TrainingState
) -> TrainingState:
    """A state on the devices; unchanged statistics stay the same object."""
    moved = on_devices(after)
    return moved._replace(start=before.start) if after.start is before.start else moved


def kinds_of(state: Any) -> dict[str, str]:
    """Types and shapes of a state's arrays, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype} {tuple(leaf.shape)}"
        for path, leaf in leaves
    }


def refuse_other_state(saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Refuses arrays other than those of this run's state."""
    found = differences(saved, wanted, "in the checkpoint", "now")
    if found:
        first = "; ".join(f"{key}: {words}" for key, words in list(found.items())[:5])
        more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
        raise RunMismatchError(
            "the checkpoint is of another model or optimizer: resume with the run's "
            f"own ({first}{more})"
        )
