"""The state of a run, and checkpoints: everything that it is, in one atomic commit.

A checkpoint holds parameters, optimizer state, the number of steps charged, a mark of
the ledger, the entropy of the sampler and the noise key, and a description of the run.
It is secret: with the noise key the noise can be subtracted from what was released.
What may leave the house is made by `jaxdp_episodic.training.report`, without a key.

It is one file, which is renamed when it is complete and on the disk, so a run that is
killed at any moment leaves either the old checkpoint or the new one.
"""

from __future__ import annotations

import errno
import functools
import json
import secrets as system_entropy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp_episodic import _validation
from jaxdp_episodic.files.archive import read_arrays, write_arrays
from jaxdp_episodic.files.atomic import TEMPORARY
from jaxdp_episodic.files.json_file import parse_json
from jaxdp_episodic.report.ledger_content import LedgerMark
from jaxdp_episodic.training.description import refuse_other_run
from jaxdp_episodic.training.discrete_noise import step_seed
from jaxdp_episodic.training.optimizers import average_of

FORMAT = 4
_KEPT = 2
# What a checkpoint's description must hold besides its format, and its most bytes.
_META = ("charged_steps", "sampler_entropy", "noise_key", "ledger", "run", "state")
_MOST_META = 2**26


class Secrets(NamedTuple):
    """What makes a run reproducible, and must never be released.

    Attributes:
      sampler_entropy: whole number of up to 256 bits, from which the draws follow.
      noise_key: (2,) uint32, key data of the noise.
    """

    sampler_entropy: int
    noise_key: np.ndarray


class Snapshot(NamedTuple):
    """One checkpoint.

    Attributes:
      state: pytree of arrays: parameters and optimizer state.
      charged_steps: steps charged to the budget when it was taken.
      secrets: see there.
      run: what the run is; see `described_run`.
      ledger: the run's ledger as it was, which it must contain for ever; None if there
        is no ledger.
    """

    state: Any
    charged_steps: int
    secrets: Secrets
    run: Mapping[str, Any]
    ledger: LedgerMark | None = None


class TrainingState(NamedTuple):
    """What changes from step to step.

    Attributes:
      params: pytree of float arrays.
      optimizer_state: of the optax optimizer.
      start: what the private statistics came to; () without.
    """

    params: Any
    optimizer_state: Any
    start: Any = ()


def released_params(state: TrainingState) -> Any:
    """Returns the parameters to evaluate and release: the last, or an average.

    With private statistics: ``{"start": what they released, "model": …}``.
    """
    model = average_of(state.params, state.optimizer_state)
    if not state.start:
        return model
    return {"start": state.start.released(), "model": model}


def initial_state(
    optimizer: optax.GradientTransformation, params: Any, start: Any = ()
) -> TrainingState:
    """Returns the state before the first step.

    Gradients are float32, and so is what the optimizer keeps, also of parameters of
    lower precision: it would change its type at the first step, and come back rounded
    from a checkpoint.
    """

    def in_float32(leaf: Any) -> Any:
        low = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
        return leaf.astype(jnp.float32) if low else leaf

    kept = optimizer.init(jax.tree.map(in_float32, params))
    return TrainingState(params, as_arrays(kept), start)


def updater(
    optimizer: optax.GradientTransformation, noise_deviation: float
) -> Callable[[TrainingState, Any], TrainingState]:
    """Returns the compiled ``(state, gradient) -> state``; types stay.

    Args:
      optimizer: gets the next as an extra argument, if it takes any.
      noise_deviation: of the noise in each coordinate of a gradient.
    """
    moved = _compiled_update(optimizer, noise_deviation)

    def update(state: TrainingState, gradient: Any) -> TrainingState:
        params, kept = moved(state.params, state.optimizer_state, gradient)
        return TrainingState(params, kept, state.start)  # the very same: see `table`

    return update


@functools.lru_cache(maxsize=8)  # a run that is resumed or repeated compiles nothing
def _compiled_update(
    optimizer: optax.GradientTransformation, noise_deviation: float
) -> Any:
    optimizer = optax.with_extra_args_support(optimizer)

    @jax.jit
    def moved(params: Any, kept: Any, gradient: Any) -> tuple[Any, Any]:
        # Optax mixes types; a caller's strict promotion is about the caller's code.
        with jax.numpy_dtype_promotion("standard"):
            updates, kept = optimizer.update(
                gradient, kept, params, noise_deviation=noise_deviation
            )
            return optax.apply_updates(params, updates), kept

    return moved


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Each is one file, named by its number of steps: an npz of two arrays of bytes, the
    leaves of the state one behind the other, and a description in JSON.

    Args:
      folder: made if missing, with mode 700; the two latest are kept.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self.folder = folder

    def _complete(self) -> list[int]:
        """Numbers of charged steps of the checkpoints, ascending."""
        names = (path.name for path in self.folder.iterdir())
        return sorted(int(name) for name in names if name.isdigit())

    @property
    def latest(self) -> int | None:
        """Number of charged steps of the latest complete checkpoint, or None."""
        return max(self._complete(), default=None)

    def save(self, snapshot: Snapshot) -> None:
        """Commits one checkpoint; when this returns it is complete.

        Raises:
          OSError: no space, or no permission. Earlier checkpoints are untouched.
        """
        ledger, step = snapshot.ledger, snapshot.charged_steps
        leaves = [_numbers(leaf) for leaf in jax.tree.leaves(snapshot.state)]
        meta = {
            "format": FORMAT,
            "charged_steps": step,
            "sampler_entropy": f"{snapshot.secrets.sampler_entropy:x}",
            "noise_key": [int(word) for word in snapshot.secrets.noise_key],
            "ledger": None if ledger is None else list(ledger),
            "run": snapshot.run,
            "state": _described(snapshot.state),
        }
        arrays = {
            "meta": np.frombuffer(json.dumps(meta).encode(), np.uint8),
            "state": np.frombuffer(b"".join(x.tobytes() for x in leaves), np.uint8),
        }
        try:
            write_arrays(self.folder / str(step), arrays, is_private=True)
        except OSError as error:
            raise OSError(
                error.errno or errno.EIO,
                f"checkpoint of step {step} could not be written: "
                f"{error.strerror or error}",
            ) from error
        for old in self._complete()[:-_KEPT]:
            (self.folder / str(old)).unlink()

    def remove_unfinished(self) -> None:
        """Removes what processes that were killed left of checkpoints.

        Only for whoever holds the folder: another process may be writing one.
        """
        for path in self.folder.glob(f"*{TEMPORARY}*"):
            path.unlink()

    def restore(self, like: Any, run: Mapping[str, Any]) -> Snapshot:
        """Returns the latest checkpoint, if it is one of this run.

        Args:
          like: a state of the same structure, shapes and types.
          run: description of the run that wants to go on.

        Raises:
          FileNotFoundError: no complete checkpoint.
          RunMismatchError: a checkpoint of another run; the message lists what differs.
          ValueError: a checkpoint that is damaged or of an unknown format.
        """
        step = self.latest
        if step is None:
            raise FileNotFoundError(f"no complete checkpoint in {self.folder}")
        path = self.folder / str(step)
        try:
            meta, content = _read(path, like)
            secrets = Secrets(
                int(meta["sampler_entropy"], 16), np.array(meta["noise_key"], np.uint32)
            )
            mark = None if meta["ledger"] is None else LedgerMark(*meta["ledger"])
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"checkpoint {path} is damaged: {error}") from error
        refuse_other_run(saved=meta["run"], wanted=run)
        if meta["charged_steps"] != step:
            raise ValueError(
                f"checkpoint {path} says that {meta['charged_steps']} steps were "
                "charged: it was renamed or edited"
            )
        if meta["state"] != _described(like) or len(content) != _size(like):
            raise ValueError(f"checkpoint {path} is damaged: a state of another kind")
        return Snapshot(_unpacked(content, like), step, secrets, meta["run"], mark)


def _read(path: Path, like: Any) -> tuple[dict[str, Any], np.ndarray]:
    """Description and bytes of a checkpoint of about such a state."""
    most = _MOST_META + _size(like)
    arrays = read_arrays(path, max_bytes=most, names=["meta", "state"])
    meta = parse_json(arrays["meta"].tobytes())
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else meta
        raise ValueError(f"format must be {FORMAT}, got {found!r}")
    missing = [name for name in _META if name not in meta]
    if missing or not isinstance(meta["run"], dict):
        raise ValueError(
            f"without {', '.join(missing)}" if missing else "run is no object"
        )
    return meta, arrays["state"]


def _size(state: Any) -> int:
    return sum(_numbers(leaf).nbytes for leaf in jax.tree.leaves(state))


def _numbers(leaf: Any) -> np.ndarray:
    """A leaf of the state on the host; of a key its data."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _described(state: Any) -> list[list[Any]]:
    """Type and shape of every leaf."""
    return [
        [str(leaf.dtype), list(leaf.shape)]
        for leaf in map(_numbers, jax.tree.leaves(state))
    ]


def _unpacked(content: np.ndarray, like: Any) -> Any:
    """The state whose leaves lie behind one another, of types and shapes of another."""
    leaves, structure = jax.tree.flatten(like)
    unpacked, start = [], 0
    for leaf in leaves:
        kind = _numbers(leaf)
        flat = np.frombuffer(content, kind.dtype, kind.size, start)
        start += kind.nbytes
        array = jnp.asarray(flat.reshape(kind.shape))
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        unpacked.append(array)
    return jax.tree.unflatten(structure, unpacked)


def new_secrets(seed: int | None) -> Secrets:
    """Returns fresh secrets; those of a seed, which somebody knows, are none.

    Raises:
      TypeError: a seed that is no number.
      ValueError: one that is negative, or several.
    """
    if seed is None:
        key = np.frombuffer(system_entropy.token_bytes(8), np.uint32)
        return Secrets(system_entropy.randbits(256), key)
    entropy = _validation.whole_number("seed", seed, minimum=0)
    sampler, noise = np.random.SeedSequence(entropy).spawn(2)
    words = sampler.generate_state(8, np.uint32)
    return Secrets(
        int.from_bytes(words.tobytes(), "little"), noise.generate_state(2, np.uint32)
    )


def noise_key(secrets: Secrets, step: int, noise: str) -> Any:
    """Returns the key of a step's noise: bytes of discrete noise, else a typed key."""
    if noise == "discrete":
        return step_seed(secrets.sampler_entropy, secrets.noise_key, step)
    # The type of key is part of what a checkpoint holds: not the default's matter.
    words = jnp.asarray(secrets.noise_key)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.fold_in(key, step)


def as_arrays(state: Any) -> Any:
    """The state with every leaf a JAX array, which is what is stored."""
    return jax.tree.map(jnp.asarray, state)
