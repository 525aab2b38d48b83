"""Small trained parts of a network whose other parameters stay frozen.

FiLM layers (Perez et al. 2018, arXiv:1709.07871; for private few-shot transfer Tobaben
et al. 2023, arXiv:2302.01190), LoRA (Hu et al. 2021, arXiv:2106.09685), and the head.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxdp_episodic.files.archive import read_arrays
from jaxdp_episodic.trainer.config.training_parts import FILM, HEAD, LORA
from jaxdp_episodic.trainer.learners.models import (
    FilmParam,
    PatchConv,
    patches,
    string_keys,
)

_NORMS = (nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.LayerNorm, nnx.RMSNorm)
_MOST_BYTES = 2**33  # largest file of parameters
_LAYERS = (nnx.Linear, nnx.Conv, PatchConv)


class Scaled(nnx.Module):
    """A layer followed by a scale and a shift for each of its outputs."""

    def __init__(self, layer: Any) -> None:
        self.layer, kernel = layer, layer.kernel[...]
        self.scale = FilmParam(jnp.ones(kernel.shape[-1], kernel.dtype))
        self.shift = FilmParam(jnp.zeros(kernel.shape[-1], kernel.dtype))

    def __call__(self, inputs: Array) -> Array:
        """Returns the layer's outputs, scaled and shifted."""
        return self.layer(inputs) * self.scale[...] + self.shift[...]

    def merged(self) -> Any:
        """Returns one layer with the same outputs."""
        layer, scale = nnx.clone(self.layer), self.scale[...]
        layer.kernel = nnx.Param(layer.kernel[...] * scale)
        layer.bias = nnx.Param(layer.bias[...] * scale + self.shift[...])
        return layer


class LowRank(nnx.Module):
    """A linear map or `PatchConv` whose kernel has a low-rank matrix added."""

    def __init__(self, layer: Any, rank: int, rngs: nnx.Rngs) -> None:
        self.layer, kernel = layer, layer.kernel[...]
        rows, columns = kernel.shape
        make = nnx.initializers.he_uniform()
        self.down = nnx.LoRAParam(make(rngs.params(), (rows, rank), kernel.dtype))
        self.up = nnx.LoRAParam(jnp.zeros((rank, columns), kernel.dtype))

    def __call__(self, inputs: Array) -> Array:
        """Returns the layer's outputs plus those of the low-rank product."""
        seen = inputs
        if isinstance(self.layer, PatchConv):
            seen = patches(inputs, self.layer.stride)
        return self.layer(inputs) + seen @ self.down[...] @ self.up[...]

    def merged(self) -> Any:
        """Returns one layer with the same outputs."""
        layer = nnx.clone(self.layer)
        layer.kernel = nnx.Param(layer.kernel[...] + self.down[...] @ self.up[...])
        return layer


def film(module: nnx.Module, *, head: str | None = "head") -> Any:
    """Returns a copy of a module in which only FiLM layers and the head are trained.

    The scales and shifts of normalization layers are the FiLM layers. If the module has
    none, each output of its linear maps and convolutions gets a scale (initially 1) and
    a shift (initially 0). `split_model` returns these and the head as parameters, and
    freezes the rest.

    Reference: Tobaben et al. (2023), arXiv:2302.01190.

    Args:
      module: a ``flax.nnx`` module, trained on public data.
      head: name of the attribute with the last layer; None: no layer is trained whole.

    Raises:
      TypeError: not an NNX module.
      ValueError: no such attribute, or nothing to scale.
    """
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"module must be a flax.nnx.Module, got a {type(module).__name__}"
        )
    if head is not None and not isinstance(getattr(module, head, None), nnx.Module):
        raise ValueError(
            f"head must name the attribute with the module's last layer, got {head!r}"
        )
    made = nnx.clone(module)
    norms = [one for _, one in nnx.iter_modules(made) if isinstance(one, _NORMS)]
    found = [_trained(one, ("scale", "bias")) for one in norms]
    if not any(found):
        made = _changed(made, _LAYERS, Scaled, head)
        if not any(isinstance(one, Scaled) for _, one in nnx.iter_modules(made)):
            raise ValueError(
                "module must have a normalization layer, a linear map or a convolution "
                f"besides its head to scale, got a {type(module).__name__} without"
            )
    if head is not None:
        for _, one in nnx.iter_modules(getattr(made, head)):
            _trained(one, tuple(vars(one)))
    return made


def adapted(module: Any, train: str, rank: int, seed: int) -> tuple[Any, Any]:
    """Returns a built-in network, adapted, and an NNX filter of its trained part."""
    head = nnx.All(nnx.Param, nnx.PathContains(HEAD))
    if train == FILM:
        return film(module), FilmParam
    if train == HEAD:
        return module, head
    if train == LORA:
        rngs = nnx.Rngs(params=jax.random.key(seed + 1))
        made = _changed(module, _LAYERS, lambda one: LowRank(one, rank, rngs), HEAD)
        return made, nnx.Any(nnx.LoRAParam, head)
    return module, nnx.Param


def merged(module: Any) -> Any:
    """Returns the network with the same outputs and without adapters."""
    return _changed(module, (Scaled, LowRank), lambda layer: layer.merged())


def plain_params(module: Any) -> Any:
    """Returns the parameters of a network without its adapters."""
    return string_keys(nnx.to_pure_dict(nnx.state(merged(module), nnx.Param)))


def parameters_file(name: str, base: Path | None) -> Path:
    """Returns the file that ``[model] parameters`` names; of a release, its arrays."""
    path = (base or Path()) / name
    return path / "parameters.npz" if path.is_dir() else path


def begin_with(module: Any, file: Path) -> None:
    """Loads a file's arrays into a built-in network; a head of another size stays."""
    arrays = read_arrays(file, max_bytes=_MOST_BYTES)
    found = {name.removeprefix("model/"): array for name, array in arrays.items()}
    filled = []
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        name, wanted = "/".join(map(str, path)), variable[...]
        array = found.get(name)
        if array is not None and array.shape == wanted.shape:
            filled.append((path, variable.replace(jnp.asarray(array, wanted.dtype))))
        elif path[0] != HEAD:
            shown = "none" if array is None else array.shape
            raise ValueError(
                f"model.parameters: {file} must have {name} of shape {wanted.shape}, "
                f"got {shown}"
            )
    nnx.update(module, nnx.from_flat_state(filled))


def _trained(module: Any, names: tuple[str, ...]) -> bool:
    """Marks parameters of a module as trained; returns whether it has any."""
    found = False
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, nnx.Param):
            setattr(module, name, FilmParam(value[...]))
            found = True
    return found


def _changed(
    module: Any,
    kinds: tuple[Any, ...],
    change: Callable[[Any], Any],
    head: str | None = None,
) -> Any:
    """Returns a copy of a module with its parts of some kinds changed, but the head."""

    def one(path: tuple[Any, ...], part: Any) -> Any:
        is_kept = not path or path[0] == head or not isinstance(part, kinds)
        return part if is_kept else change(part)

    return nnx.recursive_map(one, nnx.clone(module))
