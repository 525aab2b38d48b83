"""The state of a run, which follows from its releases; what describes a run."""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import re
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget
from jaxdp_episodic.files.json_file import differences
from jaxdp_episodic.trainer.config.training_parts import FIXED, ClippingConfig
from jaxdp_episodic.trainer.data.people import Truncation
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.gradient.precision import training_dtype
from jaxdp_episodic.trainer.gradient.processes import Processes
from jaxdp_episodic.trainer.learners.optimizers import average_of


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


def initial_state(
    optimizer: optax.GradientTransformation, params: Any, **fields: Any
) -> TrainingState:
    """Returns the state before the first step, with these further fields."""
    dtype = training_dtype(params)

    def widened(leaf: Any) -> Any:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_float else leaf

    kept = optimizer.init(jax.tree.map(widened, params))
    return TrainingState(params, jax.tree.map(jnp.asarray, kept), **fields)


def array_types(state: Any) -> dict[str, str]:
    """Returns types and shapes of a state's arrays, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype} {tuple(leaf.shape)}"
        for path, leaf in leaves
    }


def refuse_other_state(saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Refuses a checkpoint whose arrays are not those of this run's state."""
    found = differences(saved, wanted, "in the checkpoint", "now")
    if found:
        first = "; ".join(f"{key}: {words}" for key, words in list(found.items())[:5])
        more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
        raise RunMismatchError(
            "the checkpoint is of another model or optimizer: resume with the run's "
            f"own ({first}{more})"
        )


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


# Keys of a run's description that determine its epsilon or its data.
_ACCOUNTED = frozenset(
    "step before target units data seed l2_clip_norm clipping noise adaptive checks"
    "".split()
)
# Depth of nested functions and values that a part's description shows.
_DEPTH = 8
# Most characters of a part's repr.
_MOST_SHOWN = 2000
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Packages on which draws and sums depend.
_PACKAGES = ("jaxdp-episodic", "jax", "jaxlib", "numpy", "randomgen", "flax", "optax")


def described_run(
    budget: PrivacyBudget,
    data: ExampleTable,
    learner: Any,
    *,
    seed: int | None,
    clipping: ClippingConfig,
    **settings: Any,
) -> dict[str, Any]:
    """Returns what a run is, as plain values; `refuse_other_run` compares them."""
    return {
        "step": described_step(budget.step),
        "before": [described_step(step) for step in budget.before],
        "target": {
            "epsilon": str(budget.epsilon),
            "delta": budget.delta,
            "num_steps": budget.num_steps,
        },
        "learner": described_learner(learner),
        # By level, units without records included: a message can name what is missing.
        "units": data.num_units,
        "data": data.fingerprint,
        "seed": "from the operating system" if seed is None else seed,
        **({} if clipping.kind == FIXED else {"clipping": clipping.to_dict()}),
        **settings,
    }


def described_step(step: GaussianStep) -> dict[str, Any]:
    """Returns the step without its population, which the data's fingerprint covers."""
    fields = step.to_dict()
    return {k: fields[k] for k in fields if k not in ("version", "type", "population")}


def described_learner(learner: Any) -> dict[str, Any]:
    """Returns a learner's type and its plain fields."""
    plain: dict[str, Any] = {"type": type(learner).__name__}
    if dataclasses.is_dataclass(learner):
        for field in dataclasses.fields(learner):
            value = getattr(learner, field.name)
            if isinstance(value, bool | int | float | str):
                plain[field.name] = value
    return plain


def described_part(value: Any, depth: int = 0) -> Any:
    """Returns a user's own part as plain values that differ between different parts."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if depth == _DEPTH:
        return name
    if isinstance(value, Mapping):
        return {str(k): described_part(v, depth + 1) for k, v in value.items()}
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return [described_part(one, depth + 1) for one in value]
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return {"partial": described_part(parts, depth + 1)}
    if code := getattr(value, "__code__", None):
        inside = zip(code.co_freevars, value.__closure__ or (), strict=True)
        given = {k: described_part(cell.cell_contents, depth + 1) for k, cell in inside}
        return {"function": f"{value.__module__}.{value.__qualname__}", **given}
    return {"type": name, "shown": _ADDRESS.sub("", repr(value))[:_MOST_SHOWN]}


class RunMismatchError(ValueError):
    """A checkpoint, or another process, belongs to a run with other settings."""


def refuse_other_run(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses to resume if accounted settings differ; warns of other differences."""
    found = differences(saved, wanted, "in the checkpoint", "now")
    accounted = {k: found[k] for k in found if re.split(r"\W", k)[0] in _ACCOUNTED}
    if accounted:
        raise RunMismatchError(
            f"the checkpoint is of another run: {_listed(accounted)}"
        )
    if found:
        warnings.warn(
            f"the run goes on with other settings than before: {_listed(found)}",
            stacklevel=2,
        )


def check_run(processes: Processes, run: Mapping[str, Any]) -> None:
    """Refuses a process whose run or versions differ from the first process's."""
    if processes.count == 1:
        return
    own = json.loads(json.dumps(run))
    found = differences(
        processes.shared_value(own), own, "in the first process", "here"
    )
    if found:
        raise RunMismatchError(
            f"process {processes.index} of {processes.count} has another run than the "
            f"first: {_listed(found)}"
        )
    processes.meet()


def _listed(found: Mapping[str, str]) -> str:
    return "; ".join(f"{key}: {words}" for key, words in found.items())


# Read from files once: what a process has imported stays the same.
_version = functools.cache(version)


def described_versions() -> dict[str, str]:
    """Returns the versions and settings on which draws and sums depend."""
    config: Any = jax.config  # its flags are made at run time
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        **versions,
        "matmul_precision": str(config.jax_default_matmul_precision),
        "x64": str(bool(config.jax_enable_x64)),
    }


def described_opening(
    run: Mapping[str, Any], versions: Mapping[str, str], truncation: Truncation | None
) -> dict[str, str]:
    """Returns the environment of a process that charges, for the run's file."""
    more = {} if truncation is None else {"people": str(truncation)}
    if "clipping" in run:
        more["clipping"] = json.dumps(run["clipping"])
    machine = f"{platform.system()} {platform.machine()}"
    return {"machine": machine, **versions, **more}
