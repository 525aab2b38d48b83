"""Networks for episodes, on Flax NNX, and any NNX module as a pure function.

They use GroupNorm, never BatchNorm: batch statistics would couple examples of different
clip units, and a clipped contribution must depend only on its own unit.

A network may be trained in small parts, the rest being frozen: FiLM layers (Perez et
al. 2018, arXiv:1709.07871; for private few-shot transfer Tobaben et al. 2023,
arXiv:2302.01190), LoRA (Hu et al. 2021, arXiv:2106.09685), and the head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.files.archive import read_arrays
from jaxdp_episodic.trainer.config.training_parts import (
    FILM,
    HEAD,
    LINEAR,
    LORA,
    MLP_KIND,
    ModelConfig,
)

# Weight of the outputs next to the inputs of a linear map with ``skip``. In 200 steps
# of Adam noise alone makes outputs 1.5 times as long as inputs (512 to 128), so that
# prototypes would be mostly noise; what is learned outgrows this factor.
_SKIP_WEIGHT = 0.3


class PatchConv(nnx.Module):
    """A 3 x 3 convolution with padding 1, as slices and one matrix product.

    If weights differ between episodes (MAML), XLA's own convolution is several times
    slower on a CPU. On accelerators and for large images it may be faster and needs
    less memory. Both compute the same values.

    Args:
      inputs: number of input channels.
      outputs: number of output channels.
      stride: at least 1.
      use_patches: False uses XLA's convolution.
      rngs: for the initial parameters.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        stride: int = 1,
        use_patches: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        make = nnx.initializers.he_normal()
        self.kernel = nnx.Param(make(rngs.params(), (9 * inputs, outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32))
        self.stride, self.use_patches = stride, use_patches

    def __call__(self, images: Array) -> Array:
        """Maps (n, height, width, inputs) to (n, height', width', outputs)."""
        kernel, bias, step = self.kernel[...], self.bias[...], self.stride
        if not self.use_patches:
            maps = jax.lax.conv_general_dilated(
                images,
                kernel.reshape(3, 3, -1, kernel.shape[1]),
                (step, step),
                ((1, 1), (1, 1)),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            return maps + bias
        flat = patches(images, step)
        # With the transposed copy, gradients of the weights are products of short rows
        # and long ones, which XLA computes 1.5 times as fast on a CPU. One channel has
        # too few weights for that.
        if images.shape[-1] > 1:
            kernel = jax.lax.optimization_barrier(kernel.T).T
        maps = flat.reshape(-1, len(kernel)) @ kernel + bias
        return maps.reshape(*flat.shape[:3], -1)


def patches(images: Array, step: int) -> Array:
    """Returns the 3 x 3 pixels around every ``step``-th pixel, padded with zeros."""
    # Maps (n, height, width, channels) to (n, height', width', 9 channels). The images
    # are cut into blocks of ``step`` by ``step`` pixels, so that slices of blocks need
    # no strides, and gradients of slices no scatter.
    number, *sides, channels = images.shape
    outputs = [-(-side // step) for side in sides]
    blocks = [output + 2 // step for output in outputs]
    down, right = (step * b - side - 1 for b, side in zip(blocks, sides, strict=True))
    edges = (0, 0, 0), (1, down, 0), (1, right, 0), (0, 0, 0)
    padded = jax.lax.pad(images, jnp.zeros((), images.dtype), edges)
    cut = padded.reshape(number, blocks[0], step, blocks[1], step * channels)
    slices = []
    for row in range(3):
        below = row // step
        rows = cut[:, below : below + outputs[0], row % step]
        for first in range(0, 3, step):
            right, taken = first // step, min(3 - first, step) * channels
            slices.append(rows[:, :, right : right + outputs[1], :taken])
    return jnp.concatenate(slices, axis=-1)


class GroupNorm(nnx.GroupNorm):
    """Flax's GroupNorm, with few passes over pixels in second derivatives."""

    def __call__(self, images: Array) -> Array:
        """Maps (n, height, width, channels) to the same shape."""
        scale, bias = self.scale, self.bias
        assert scale is not None and bias is not None
        flat = images.reshape(len(images), -1, images.shape[-1])
        # First sums each channel's pixels in order, then the channels of a group.
        means = self._group_means(jnp.mean(flat, axis=1))
        # Subtracting any constant is valid. The centred means are 0, but have the
        # gradients of the means, so no gradient of a pixel needs the mean of others.
        constant = jax.lax.stop_gradient(means)
        means = means - constant
        centered = flat - constant[:, None]
        squares = self._group_means(jnp.mean(jnp.square(centered), axis=1))
        variances = squares - jnp.square(means)
        scales = scale[...] * jax.lax.rsqrt(variances + self.epsilon)
        offsets = bias[...] - means * scales
        normal = centered * scales[:, None] + offsets[:, None]
        return normal.reshape(images.shape)

    def _group_means(self, of_channels: Array) -> Array:
        """Returns (n, channels): the mean of each channel's group."""
        # A matrix product, which XLA never recomputes for every pixel.
        size = of_channels.shape[1] // self.num_groups
        weights = np.kron(np.eye(self.num_groups), np.full((size, size), 1 / size))
        weights = weights.astype(of_channels.dtype)
        return jnp.matmul(of_channels, weights, precision=jax.lax.Precision.HIGHEST)


class ConvBlock(nnx.Module):
    """Convolution of stride 2, GroupNorm, ReLU."""

    def __init__(
        self, inputs: int, outputs: int, *, use_patches: bool = True, rngs: nnx.Rngs
    ) -> None:
        self.conv = PatchConv(
            inputs, outputs, stride=2, use_patches=use_patches, rngs=rngs
        )
        self.norm = GroupNorm(outputs, num_groups=math.gcd(8, outputs), rngs=rngs)

    def __call__(self, images: Array) -> Array:
        """Maps (n, height, width, inputs) to (n, half, half, outputs)."""
        return jax.nn.relu(self.norm(self.conv(images)))


class ConvNet(nnx.Module):
    """Convolutions of stride 2, then one linear map to an embedding or logits.

    Args:
      image_shape: (height, width, channels).
      channels: output channels of each convolution.
      outputs: size of the embedding, or number of classes.
      use_patches: see `PatchConv`.
      rngs: for the initial parameters.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        channels: Sequence[int],
        outputs: int,
        *,
        use_patches: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        height, width, last = image_shape
        blocks = []
        for number in channels:
            blocks.append(ConvBlock(last, number, use_patches=use_patches, rngs=rngs))
            height, width, last = (height + 1) // 2, (width + 1) // 2, number
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(height * width * last, outputs, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        """Maps (n, height, width, channels) to (n, outputs)."""
        return self.head(self.hidden(images))

    def hidden(self, images: Array) -> Array:
        """Maps (n, height, width, channels) to (n, units), the last layer's input."""
        for block in self.blocks:
            images = block(images)
        return images.reshape(len(images), -1)


class MLP(nnx.Module):
    """Fully connected layers with tanh.

    Args:
      inputs: number of features, over all axes.
      hidden: units of each hidden layer.
      outputs: units of the last layer.
      rngs: for the initial parameters.
    """

    def __init__(
        self, inputs: int, hidden: Sequence[int], outputs: int, *, rngs: nnx.Rngs
    ) -> None:
        *sizes, last = itertools.pairwise([inputs, *hidden, outputs])
        self.layers = nnx.List([nnx.Linear(*each, rngs=rngs) for each in sizes])
        self.head = nnx.Linear(*last, rngs=rngs)

    def __call__(self, inputs: Array) -> Array:
        """Maps (n, *features) to (n, outputs)."""
        return self.head(self.hidden(inputs))

    def hidden(self, inputs: Array) -> Array:
        """Maps (n, *features) to (n, units), the last layer's input."""
        units = inputs.reshape(len(inputs), -1)
        for layer in self.layers:
            units = jnp.tanh(layer(units))
        return units


class Linear(nnx.Module):
    """One linear map without a bias; initially orthogonal.

    Args:
      inputs: number of features, over all axes.
      outputs: size of the embedding, or number of classes.
      skip: also return the inputs, next to 0.3 times the outputs. Initially, and until
        something is learned, distances are then close to those of the inputs.
      rngs: for the initial parameters.
    """

    def __init__(
        self, inputs: int, outputs: int, *, skip: bool = False, rngs: nnx.Rngs
    ) -> None:
        make = nnx.initializers.orthogonal()
        self.kernel = nnx.Param(make(rngs.params(), (inputs, outputs), jnp.float32))
        self.skip = skip

    def __call__(self, inputs: Array) -> Array:
        """Maps (n, *features) to (n, outputs); ``skip``: to (n, features + outputs)."""
        seen = self.hidden(inputs)
        outputs = seen @ self.kernel[...]
        if not self.skip:
            return outputs
        scaled = _SKIP_WEIGHT * outputs
        return jnp.concatenate([seen.astype(outputs.dtype), scaled], axis=-1)

    def hidden(self, inputs: Array) -> Array:
        """Maps (n, *features) to (n, all features), the map's input."""
        return inputs.reshape(len(inputs), -1)


class FilmParam(nnx.Param):
    """A parameter trained by `film`: a scale, a shift, or a parameter of the head."""


def split_model(
    module: Any, method: str = "__call__", *, wrt: Any = None
) -> tuple[Callable[[Any, Array], Array], Any]:
    """Returns ``(apply, params)``: a model as a pure function of its trained part.

    Args:
      module: a ``flax.nnx`` module, called as ``module(inputs)``; see
        `refuse_shared_state`. Or a pair (``flax.linen`` module, its parameters), or
        (function of parameters and inputs, parameters), with parameters in nested
        dictionaries.
      method: name of the NNX module's method to call.
      wrt: what is trained. For NNX a filter, such as ``nnx.LoRAParam``; None: what
        `film` has marked, or else ``nnx.Param``. For a pair a function of a parameter's
        path (a tuple of keys) that returns True if it is trained; None: all are.

    Returns:
      ``apply(params, inputs)``, and the trained parameters as nested dictionaries of
      arrays. All other arrays of the module are constants, with their types.

    Raises:
      TypeError: not such a model.
      ValueError: a module with batch statistics (BatchNorm) or random state (Dropout)
        that is not in evaluation mode, or nothing to train.
    """
    if isinstance(module, tuple) and len(module) == 2:
        return _split_pair(*module, wrt)
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"module must be a flax.nnx.Module, got a {type(module).__name__}; one of "
            "flax.linen needs its parameters: split_model((module, module.init(key, "
            "inputs)['params']))"
        )
    refuse_shared_state(module)
    if wrt is None:
        has_film = jax.tree.leaves(nnx.state(module, FilmParam))
        wrt = FilmParam if has_film else nnx.Param
    graph, state, rest = nnx.split(module, wrt, ...)
    if not jax.tree.leaves(state) and wrt is not nnx.Param:
        raise ValueError(f"wrt must name a parameter to train, got {wrt!r}")
    return _Apply(graph, state, rest, method), string_keys(nnx.to_pure_dict(state))


def _split_pair(
    model: Any, params: Any, wrt: Callable[[tuple[Any, ...]], bool] | None
) -> tuple[Callable[[Any, Array], Array], Any]:
    """Does what `split_model` does, for a function or linen module and parameters."""
    apply = LinenApply(model) if isinstance(model, linen.Module) else model
    if wrt is None:
        return apply, params
    trained, whole = parted(params, wrt)
    if not trained:
        paths = ", ".join("/".join(map(str, p)) for p in list(flatten_dict(params))[:5])
        raise ValueError(f"wrt must be true for a path, got none of {paths}")
    return lambda params, inputs: apply(whole(params), inputs), trained


def parted(
    params: Any, is_part: Callable[[tuple[Any, ...]], bool]
) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the part of nested dictionaries at some paths, and how to put it back."""
    _validation.instance("params", params, Mapping, "nested dictionaries")
    flat = flatten_dict(params, keep_empty_nodes=True)
    part = {path: leaf for path, leaf in flat.items() if is_part(path)}
    return unflatten_dict(part), lambda new: unflatten_dict(flat | flatten_dict(new))


@dataclass(frozen=True)
class LinenApply:
    """A linen module as a function; equal for equal modules."""

    module: Any

    def __call__(self, params: Any, inputs: Array) -> Array:
        """Returns the module's outputs."""
        return self.module.apply({"params": params}, inputs)


class _Apply:
    """A module as a function; equal for modules of the same architecture."""

    # So a repeated or resumed run with a new network uses the compiled functions of the
    # old one. A module that holds more than parameters is equal only to itself.

    def __init__(self, graph: Any, state: Any, rest: Any, method: str) -> None:
        self._graph, self._rest, self._method = graph, rest, method
        self._variables = list(nnx.to_flat_state(state))
        # Equal only to itself if it holds constants or is not hashable.
        self._alike: Any = object() if jax.tree.leaves(rest) else (graph, method)
        try:
            hash(graph)
        except TypeError:
            self._alike = object()

    def __call__(self, params: Any, inputs: Array) -> Array:
        module = self.module(params)
        shared = _shared_values(module)
        outputs = getattr(module, self._method)(inputs)
        for name, value in _shared_values(module).items():
            if value is not shared[name]:
                raise ValueError(
                    f"module must not change {name} when it is called: batch "
                    "statistics and random numbers must be in evaluation mode"
                )
        return outputs

    def module(self, params: Any) -> Any:
        """Returns the module with these parameters."""
        flat = flatten_dict(params)
        filled = [(p, v.replace(flat[tuple(map(str, p))])) for p, v in self._variables]
        return nnx.merge(self._graph, nnx.from_flat_state(filled), self._rest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Apply) and self._alike == other._alike

    def __hash__(self) -> int:
        return hash(self._alike)


def refuse_shared_state(module: nnx.Module) -> None:
    """Raises unless a module's outputs depend only on its parameters and inputs.

    After ``module.eval()`` batch statistics (of public data) are constants and Dropout
    does nothing. Both are then allowed, and a call that changes them is refused.

    Raises:
      ValueError: batch statistics (BatchNorm), which carry data between clip units, so
        that clipping units would bound nothing; or random state (Dropout with its own
        stream), of which one sample would be used forever.
    """
    modules = dict(nnx.iter_modules(module))
    still, quiet = (
        {path for path, one in modules.items() if getattr(one, name, None) is True}
        for name in ("use_running_average", "deterministic")
    )
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        name = "/".join(map(str, path))
        if isinstance(variable, nnx.BatchStat) and path[:-1] not in still:
            raise ValueError(
                f"module must not have batch statistics, got {name}: they couple the "
                "examples of different clip units; use GroupNorm or LayerNorm, or, if "
                "they come from public data, make them constant with module.eval()"
            )
        owners = {path[:depth] for depth in range(len(path))}
        if isinstance(variable, nnx.RngState) and not owners & quiet:
            raise ValueError(
                f"module must not use random numbers, got {name}: the same ones would "
                "be used forever; leave out Dropout, or turn it off with module.eval()"
            )


def _shared_values(module: Any) -> dict[str, Any]:
    """Returns batch statistics and random state by path."""
    found = nnx.to_flat_state(nnx.state(module, (nnx.BatchStat, nnx.RngState)))
    return {"/".join(map(str, path)): one.get_value() for path, one in found}


def string_keys(tree: Any) -> Any:
    """Returns nested dictionaries with all keys as strings, as checkpoints need."""
    if isinstance(tree, dict):
        return {str(key): string_keys(value) for key, value in tree.items()}
    return tree


def built_module(
    config: ModelConfig,
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    embeds: bool = False,
) -> Any:
    """Returns the NNX module for inputs of this shape (without a batch axis)."""
    # If the model embeds, outputs are the learned part of the embedding.
    rngs = nnx.Rngs(config.seed)
    if config.kind == LINEAR:
        skip = bool(config.skip) and embeds
        return Linear(math.prod(input_shape), num_outputs, skip=skip, rngs=rngs)
    if config.kind == MLP_KIND:
        return MLP(math.prod(input_shape), config.channels, num_outputs, rngs=rngs)
    if len(input_shape) != 3:
        raise ValueError(
            f"kind={config.kind!r} needs images (height, width, channels), "
            f"got features of shape {input_shape}"
        )
    return ConvNet(input_shape, config.channels, num_outputs, rngs=rngs)


def apply_and_params(
    model: Any, input_shape: tuple[int, ...], *, seed: int = 0
) -> tuple[Callable[[Any, Array], Array], Any]:
    """Returns a user's model as a pure function, and its initial parameters."""
    # A linen module's parameters are made here, from a public seed.
    is_pair = isinstance(model, tuple) and len(model) == 2 and callable(model[0])
    if isinstance(model, nnx.Module) or is_pair:
        return split_model(model)
    if isinstance(model, linen.Module):
        inputs = jnp.zeros((1, *input_shape), jnp.float32)
        made: Any = model.init(jax.random.key(seed), inputs)
        others = sorted(made.keys() - {"params"})
        if others:
            raise ValueError(
                f"model must have only parameters, got the collection {others[0]!r}: "
                "batch statistics couple the examples of different clip units; use "
                "GroupNorm or LayerNorm, or close over those of public data: model = "
                "(lambda params, inputs: module.apply({'params': params, "
                f"{others[0]!r}: constants}}, inputs), params), in evaluation mode"
            )
        return LinenApply(model), made["params"] if "params" in made else {}
    raise TypeError(
        "model must be a module of flax.nnx or flax.linen, or a pair (apply, params), "
        f"got a {type(model).__name__}"
    )


def learner_of(learner: Any, apply: Callable[[Any, Array], Array]) -> Any:
    """Returns a user's learner for a model: an object, or a function of ``apply``."""
    is_learner = hasattr(learner, "predict") and not isinstance(learner, type)
    made = learner(apply) if callable(learner) and not is_learner else learner
    for name in ("is_regression", "loss", "predict"):
        if not hasattr(made, name):
            raise TypeError(
                "learner must be a learner, or a function of apply that returns one: "
                f"see Learner; got a {type(made).__name__} without {name}"
            )
    return made


# --- Small trained parts ---

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
    _validation.instance("module", module, nnx.Module, "a flax.nnx.Module")
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
