"""Networks trained elsewhere: ONNX files as features of images."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp_episodic.files.onnx_file import read_onnx, require_onnx
from jaxdp_episodic.trainer.config.training_parts import (
    BGR,
    GREY,
    MAX,
    NONE,
    NUM_CHANNELS,
    FeaturesConfig,
)

# Weights of red, green and blue in grey (ITU-R BT.601, as Pillow).
_LUMA = (0.299, 0.587, 0.114)
_FATAL = 4  # log level of ONNX Runtime: prints nothing; errors are raised


def network_features(
    config: FeaturesConfig, base: Path | None = None
) -> tuple[Callable[[np.ndarray], np.ndarray], str]:
    """Returns features of images from a network in an ONNX file, and its SHA-256."""
    # The network gets one image at a time, so that features *cannot* depend on other
    # images, whatever it contains. Each image runs in one CPU thread, and as many
    # images at once as there are cores; their number does not change the result.
    # Another processor or version of ONNX Runtime may change its last bits.
    path = (base or Path()) / str(config.path)
    network = read_onnx(path, config.output)
    runtime = require_onnx("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.log_severity_level = _FATAL
    try:
        session = runtime.InferenceSession(
            network.content, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # its exception types are private
        raise ValueError(f"{path} cannot be run: {_first_line(error)}") from None
    name, size = _checked_input(session.get_inputs(), config, path)
    prepared = jax.jit(lambda image: _prepared(image, config, size))

    def one(image: np.ndarray) -> np.ndarray:
        pixels = np.asarray(prepared(image))
        try:
            made = session.run([network.output], {name: pixels})[0]
        except Exception as error:  # its exception types are private
            raise ValueError(
                f"{path} cannot be run on {pixels.shape}: {_first_line(error)}"
            ) from None
        return _pooled(np.asarray(made), config, path)

    def features(images: np.ndarray) -> np.ndarray:
        if images.ndim != 4 or images.dtype.kind != "f":
            raise ValueError(
                "features of kind 'onnx' need images (height, width, channels) of "
                f"floating numbers, got {images.dtype} of shape {images.shape[1:]}"
            )
        with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="onnx") as pool:
            return np.stack(list(pool.map(one, images)))

    return features, network.sha256


def _checked_input(
    inputs: Any, config: FeaturesConfig, path: Path
) -> tuple[str, tuple[int, int] | None]:
    """Returns the input's name, and the size to resize images to; None: unchanged."""
    if len(inputs) != 1:
        found = [one.name for one in inputs]
        raise ValueError(f"{path} must have one input (the images), has {found}")
    (images,) = inputs
    shape = [n if isinstance(n, int) and n > 0 else None for n in images.shape]
    if images.type != "tensor(float)" or len(shape) != 4:
        raise ValueError(
            f"input {images.name!r} of {path} must be float32 images of 4 axes, is "
            f"{images.type} of shape {images.shape}"
        )
    if config.channels_last:
        shape = [shape[0], shape[3], shape[1], shape[2]]
    number, channels, height, width = shape
    if number not in (None, 1):
        raise ValueError(
            f"input {images.name!r} of {path} must take one image, takes {number}; "
            "export it with a first axis that is dynamic, or 1"
        )
    wanted = NUM_CHANNELS[str(config.channels)]
    if channels not in (None, wanted):
        raise ValueError(
            f"channels={config.channels!r} means {wanted} channels, but input "
            f"{images.name!r} of {path} takes {channels}; its shape is {images.shape}"
        )
    size = config.size
    if size is None:
        if height is None or width is None:
            return images.name, None
        return images.name, (height, width)
    if height not in (None, size[0]) or width not in (None, size[1]):
        raise ValueError(
            f"size must be that of input {images.name!r} of {path}, {height, width}, "
            f"got {size}"
        )
    return images.name, (size[0], size[1])


def _prepared(
    image: jax.Array, config: FeaturesConfig, size: tuple[int, int] | None
) -> jax.Array:
    """Returns one image (H, W, channels) as the network's input."""
    found, wanted = image.shape[-1], NUM_CHANNELS[str(config.channels)]
    if found not in (1, 3):
        raise ValueError(f"images must have 1 or 3 channels, got {found}")
    image = image.astype(jnp.float32)
    if config.channels == GREY and found == 3:
        image = image @ jnp.array(_LUMA, jnp.float32)[:, None]
    image = jnp.repeat(image, wanted // image.shape[-1], axis=-1)
    if config.channels == BGR:
        image = image[..., ::-1]
    if size is not None:
        image = jax.image.resize(image, (*size, wanted), "bilinear")
    mean, std = (jnp.array(one, jnp.float32) for one in (config.mean, config.std))
    image = (image - mean) / std
    return (image if config.channels_last else image.transpose(2, 0, 1))[None]


def _pooled(made: np.ndarray, config: FeaturesConfig, path: Path) -> np.ndarray:
    """Returns the features (D,) of an output (1, ...), pooled over positions."""
    if made.dtype.kind not in "iuf" or not 2 <= made.ndim <= 4 or len(made) != 1:
        raise ValueError(
            f"output of {path} must be numbers of one image, of shape (1, D), "
            "(1, positions, D) or an image's, got "
            f"{made.dtype} of shape {made.shape}"
        )
    values = made[0].astype(np.float32)
    if config.pool == NONE or values.ndim == 1:
        return values.reshape(-1)
    if values.ndim == 3 and not config.channels_last:
        values = np.moveaxis(values, 0, -1)
    grid = int(config.grid or 1)
    if min(values.shape[:-1]) < grid:
        raise ValueError(
            f"grid must be at most the positions along each axis of the output of "
            f"{path}, {values.shape[:-1]}, got {grid}"
        )
    pool = np.max if config.pool == MAX else np.mean
    parts = [values]
    for axis in range(values.ndim - 1):
        parts = [one for part in parts for one in np.array_split(part, grid, axis)]
    positions = tuple(range(values.ndim - 1))
    return np.concatenate([pool(part, axis=positions) for part in parts])


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
