"""Fixed features: a function of single examples, chosen without looking at the data.

The function is applied to every example before a run begins. It does not depend on the
data, so an example's features depend on that example only: every guarantee holds
unchanged, and nothing is charged. A function that was fitted to the private data
without privacy, or chosen by such fits, has no such guarantee.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.fft import dct

from jaxdp_episodic import _validation
from jaxdp_episodic.files import column_folder
from jaxdp_episodic.files.atomic import LOCK, locked
from jaxdp_episodic.files.onnx_file import read_onnx, require_onnx
from jaxdp_episodic.trainer.config.training_parts import (
    BGR,
    GREY,
    LEAST_SIDE,
    MAX,
    NONE,
    NUM_CHANNELS,
    ONNX,
    SCALED,
    WAVELETS,
    FeaturesConfig,
)
from jaxdp_episodic.trainer.data.scales import scaled
from jaxdp_episodic.trainer.data.splits import TRAIN
from jaxdp_episodic.trainer.data.stored import Records, write_columns
from jaxdp_episodic.trainer.data.table import ExampleTable, StoredFeatures, numbered

_VERSION = 1  # version of the settings that a cache is compared by
_BATCH = 500  # most rows per call
_MOST_FEATURES = 2**16  # per example
# Largest relative difference between a row's features alone and in a batch; rounding
# errors are smaller.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class FixedFeatures:
    """A fixed function that is applied to each example before a run.

    Pass a backbone of any framework, pretrained on *public* data:
    ``FixedFeatures(function, name="…")``; or for images use `FixedFeatures.onnx` or
    `FixedFeatures.wavelets`.

    Attributes:
      function: ``(n, *features) array -> (n, D) array``; each row of the result is a
        function of that row only (no batch statistics, no random numbers).
      name: identifies the function with its version and weights. A cache, and a resumed
        run, must have the same name.
      unit_norm: scale each row to norm 1 (a row of zeros stays zero).
      settings: plain values that the function depends on; also compared.
      one_by_one: the function treats rows one by one, so it is called with as many rows
        as there are. Otherwise it is always called with 500 rows, so that a row's last
        bits do not depend on the number of other rows.
    """

    function: Callable[[np.ndarray], Any]
    name: str
    unit_norm: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    one_by_one: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must be callable, got {self.function!r}")
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name must be a non-empty string, got {self.name!r}")
        _validation.flag("unit_norm", self.unit_norm)
        _validation.flag("one_by_one", self.one_by_one)
        self.described()  # checks that JSON can hold the settings

    @classmethod
    def wavelets(cls) -> FixedFeatures:
        """Returns the wavelet features of images; see `compiled_wavelets`."""
        return cls(_wavelets, WAVELETS)

    @classmethod
    def onnx(cls, path: str | os.PathLike[str], **settings: Any) -> FixedFeatures:
        """Returns features of images from a network in an ONNX file.

        Args:
          path: the file.
          **settings: settings of the table ``features`` of a config, by name.

        Raises:
          ImportError: the extra ``[onnx]`` is not installed.
          OSError, TypeError, ValueError: a file that does not hold a network for
            images, or a setting that does not fit it.
        """
        found = cls.of(FeaturesConfig(kind=ONNX, path=os.fspath(path), **settings))
        assert found is not None
        return found

    @classmethod
    def of(
        cls, config: FeaturesConfig, base: Path | None = None
    ) -> FixedFeatures | None:
        """Returns the features of a config; None: the examples are used unchanged.

        Paths are relative to ``base``; errors as in `onnx`.
        """
        if config.kind == ONNX:
            function, sha256 = network_features(config, base)
            settings = {**config.network, "sha256": sha256}
            return cls(function, ONNX, settings=settings, one_by_one=True)
        if config.kind == SCALED:
            settings = {"mean": config.mean, "std": config.std}
            function = functools.partial(scaled, **settings)
            return cls(function, SCALED, False, settings, one_by_one=True)
        return cls.wavelets() if config.kind == WAVELETS else None

    def described(self) -> dict[str, Any]:
        """Returns the description of the features as plain values.

        Raises:
          TypeError: settings that are not plain values.
        """
        plain = {
            "name": self.name,
            "unit_norm": self.unit_norm,
            "settings": dict(self.settings),
            "version": _VERSION,
        }
        return json.loads(json.dumps(plain))

    def table(self, data: ExampleTable, *, cache: Path | None = None) -> ExampleTable:
        """Returns the table with these features instead of the examples' own.

        Args:
          data: the table; its units, targets and owners are kept.
          cache: folder that stores the features after the first call. Only its owner
            can read it, because features of private data are private. If it is damaged,
            or made from other data or settings, it is made again with a warning. If the
            data are on disk, the features stay on disk too.

        Raises:
          OSError: a cache that cannot be read or written, or a folder of other files.
          ValueError: features with another number of rows, with more than one axis, or
            not finite; or a row that changes with the other rows of its batch.
        """
        made: Any
        if cache is None:
            made = self.of_examples(data.features)
        else:
            made = self._cached(Path(cache), data)
        return data.with_features(made)

    def of_examples(self, examples: Any) -> np.ndarray:
        """Returns the features (n, D) of examples (n, ...), float32; see `table`."""
        return np.concatenate(list(self._made(examples)))

    def _made(self, examples: Any) -> Iterator[np.ndarray]:
        """Yields the features, some rows at a time."""
        if not len(examples):
            raise ValueError(
                "data must have at least one example to make features of, got none"
            )
        columns = None
        for start in range(0, len(examples), _BATCH):
            rows = examples[start : start + _BATCH]
            made = self._called(rows)
            if columns is None:
                self._check_rows_alone(rows, made)
                columns = made.shape[1]
                if columns > _MOST_FEATURES:
                    raise ValueError(
                        f"features must be at most {_MOST_FEATURES} numbers per "
                        f"example, got {columns}"
                    )
            elif made.shape[1] != columns:
                raise ValueError(
                    f"features must be {columns} numbers for every example, got "
                    f"{made.shape[1]}"
                )
            if self.unit_norm:
                norms = np.linalg.norm(made, axis=1, keepdims=True)
                made = made / np.maximum(norms, np.float32(1e-12))
            yield made

    def _called(self, rows: np.ndarray) -> np.ndarray:
        """Returns the function's result for up to `_BATCH` rows, checked."""
        number = len(rows)
        if number < _BATCH and not self.one_by_one:
            rest = np.zeros((_BATCH - number, *rows.shape[1:]), rows.dtype)
            rows = np.concatenate([rows, rest])
        try:
            made = np.asarray(self.function(rows))
        except ValueError as error:  # such as rows of different lengths
            error.add_note(f"in the function of features {self.name!r}")
            raise
        if made.ndim != 2 or len(made) != len(rows) or not made.shape[1]:
            raise ValueError(
                f"function of features {self.name!r} must return an array of shape "
                f"({len(rows)}, D) for {len(rows)} rows, got {made.shape}"
            )
        if made.dtype.kind not in "iuf":
            raise TypeError(
                f"function of features {self.name!r} must return numbers, got "
                f"{made.dtype}"
            )
        with np.errstate(over="ignore"):  # becomes infinity, which is refused below
            made = made[:number].astype(np.float32)
        bad = ~np.isfinite(made).all(axis=1)
        if bad.any():
            raise ValueError(f"features {self.name!r} must be finite, but some are not")
        return made

    def _check_rows_alone(self, rows: np.ndarray, made: np.ndarray) -> None:
        """Raises if the rows of the function's result depend on other rows."""
        # Such features would couple examples of different clip units, so clipping each
        # unit's contribution would not bound its influence.
        half = len(rows) // 2 + 1
        alone = self._called(rows[:half])
        apart = np.abs(alone - made[:half]).max()
        if apart > _ROUNDING * np.abs(made[:half]).max():
            raise ValueError(
                f"features {self.name!r} of an example must depend only on that "
                "example, but they change with the rest of the batch, or between calls "
                "(batch statistics or dropout? switch the model to evaluation mode)"
            )

    def _cached(self, folder: Path, data: ExampleTable) -> np.ndarray | StoredFeatures:
        """Returns the features from a folder of columns, made first if necessary."""
        settings = json.dumps(self.described(), sort_keys=True)
        made_from = {"settings": settings, "data": data.fingerprint}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder):
            if column_folder.is_complete(folder):
                try:
                    return _opened(folder, made_from, data)
                except (OSError, ValueError) as error:
                    warnings.warn(
                        f"the cache of features {folder} is made again: {error}",
                        stacklevel=4,
                    )
            names = {inside.name for inside in folder.iterdir()}
            others = names - {column_folder.MANIFEST, TRAIN, LOCK}
            if others:
                raise FileExistsError(
                    f"{folder} must be a cache of features, but has {min(others)!r}"
                )
            (folder / column_folder.MANIFEST).unlink(missing_ok=True)
            table = numbered(np.arange(data.num_examples), units={})
            parts = self._made(data.features)
            first = next(parts)
            records = Records(table, lambda rows: itertools.chain([first], parts))
            write_columns(folder, {TRAIN: records}, made_from)
            return _opened(folder, made_from, data)


def _opened(
    folder: Path, made_from: dict[str, str], data: ExampleTable
) -> np.ndarray | StoredFeatures:
    """Returns cached features: on disk, or in memory after checking the checksum."""
    found = column_folder.open_split(folder)
    if found.made_from != made_from:
        raise ValueError("it was made from other data or settings")
    column = found.features
    if column.shape[0] != data.num_examples:
        raise ValueError(f"it has {column.shape[0]} rows")
    features = StoredFeatures(column)
    if isinstance(data.features, StoredFeatures):
        return features
    column_folder.compare_sums([column])
    return features[:]


# --- Wavelets ---


def _wavelets(images: np.ndarray) -> np.ndarray:
    return np.asarray(compiled_wavelets(images.shape[1:])(jnp.asarray(images)))


# Wavelengths as fractions of the image's side: 4 and 8 pixels of 28.
_WAVELENGTHS = (1 / 7, 2 / 7)
_ORIENTATIONS = 8  # per wavelength
_CELLS = 7  # of the pooling grid, along each side
_COEFFICIENTS = 5  # lowest coefficients of the cosine transform over these cells
# Samples of a response along each side: two per cell, enough for these wavelengths.
_SAMPLES = 2 * _CELLS
# Contrast in [0, 1] added to the local energy; keeps moduli of flat regions small.
_FLOOR = 0.03
# Standard deviation of the neighbourhood for the local energy, in response samples.
_NEIGHBOURHOOD = 0.7


# Response of a filter to a constant: its deviation is half of its wavelength.
_OFFSET = math.exp(-(math.pi**2) / 2)


class Filters(NamedTuple):
    """Separable filters along one axis of an image: F filters of S scales."""

    waves: np.ndarray  # (F, 14, size) complex64
    # (S, 14, size) float32: Gaussians, to subtract the response to a constant.
    envelopes: np.ndarray
    coefficients: np.ndarray  # (5, size) float32: `_spectrum` of the image itself


@functools.cache
def compiled_wavelets(image_shape: tuple[int, ...]) -> Callable[[Array], Array]:
    """Returns the function ``(n, *image_shape) -> (n, 425 * channels)`` of images."""
    # It takes and returns float32; integers are read as 0 to 255.
    if len(image_shape) != 3 or min(image_shape[:2]) < LEAST_SIDE:
        raise ValueError(
            f"wavelets need images (height, width, channels) of at least {LEAST_SIDE} "
            f"x {LEAST_SIDE} pixels, got features of shape {tuple(image_shape)}"
        )
    filters = make_filters(*image_shape[:2])

    def features(images: Array) -> Array:
        if not jnp.issubdtype(images.dtype, jnp.floating):
            images = images.astype(jnp.float32) / 255.0
        channels = jnp.moveaxis(images, -1, 0)
        made = jnp.concatenate([_of_one_channel(c, *filters) for c in channels], axis=1)
        norms = jnp.linalg.norm(made, axis=1, keepdims=True)
        return made / jnp.maximum(norms, 1e-12)  # a row of zeros stays zero

    return jax.jit(features)


def make_filters(height: int, width: int) -> tuple[Filters, Filters]:
    """Returns the filters along the rows and the columns of images of this size."""
    made = []
    for size, part in ((height, math.sin), (width, math.cos)):
        waves, envelopes = [], []
        for share in _WAVELENGTHS:
            wavelength = share * min(height, width)
            deviation = wavelength / 2
            envelope = _sampled(size, _SAMPLES, deviation)
            envelope /= math.sqrt(2 * math.pi) * deviation
            envelopes.append(envelope)
            for angle in math.pi * np.arange(_ORIENTATIONS) / _ORIENTATIONS:
                phase = 2j * math.pi / wavelength * part(angle)
                waves.append(envelope * np.exp(phase * _distances(size, _SAMPLES)))
        arrays = np.array(waves, np.complex64), np.array(envelopes, np.float32)
        made.append(Filters(*arrays, _spectrum(size)))
    return made[0], made[1]


def _of_one_channel(images: Array, rows: Filters, columns: Filters) -> Array:
    """Returns the features (n, 425) of images (n, H, W)."""
    number, height, width = images.shape
    total, scales = len(columns.waves), len(_WAVELENGTHS)
    # Columns first, in one product for all filters, then rows.
    waves = [np.real(columns.waves), np.imag(columns.waves)]
    matrix = np.stack(waves).reshape(-1, width).T
    first = (images.reshape(-1, width) @ matrix).reshape(number, height, 2, total, -1)
    along = functools.partial(jnp.einsum, "fij,njfl->nfil")
    real, imaginary = np.real(rows.waves), np.imag(rows.waves)
    re = along(real, first[:, :, 0]) - along(imaginary, first[:, :, 1])
    im = along(real, first[:, :, 1]) + along(imaginary, first[:, :, 0])
    both = rows.envelopes, images, columns.envelopes
    offset = _OFFSET * jnp.einsum("sij,njk,slk->nsil", *both)
    shape = (number, scales, total // scales, _SAMPLES, _SAMPLES)
    energy = jnp.square(re.reshape(shape) - offset[:, :, None])
    energy = energy + jnp.square(im.reshape(shape))
    means = _means(_sampled(_SAMPLES, _SAMPLES, _NEIGHBOURHOOD)).astype(np.float32)
    around = jnp.einsum("ij,nsjk,lk->nsil", means, jnp.sum(energy, axis=2), means)
    moduli = jnp.sqrt(energy / (around + _FLOOR**2)[:, :, None])
    pooled = _spectrum(_SAMPLES)
    maps = jnp.einsum("ij,nsojk,lk->nsoil", pooled, moduli, pooled)
    both = rows.coefficients, images, columns.coefficients
    low = jnp.einsum("ij,njk,lk->nil", *both)
    return jnp.concatenate([maps.reshape(number, -1), low.reshape(number, -1)], axis=1)


def _distances(size: int, grid: int) -> np.ndarray:
    """Returns (grid, size): distance from each cell's centre to each pixel."""
    middles = (np.arange(grid) + 0.5) * size / grid - 0.5
    return np.arange(size) - middles[:, None]


def _sampled(size: int, grid: int, deviation: float) -> np.ndarray:
    """Returns (grid, size): a Gaussian around each cell's centre."""
    return np.exp(-0.5 * (_distances(size, grid) / deviation) ** 2)


def _means(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(axis=1, keepdims=True)


def _spectrum(size: int) -> np.ndarray:
    """Returns (5, size) float32: means around 7 cells, then their lowest DCT-II."""
    pooling = _means(_sampled(size, _CELLS, size / _CELLS / 2))
    return np.asarray(dct(pooling, axis=0, norm="ortho"), np.float32)[:_COEFFICIENTS]


# --- Networks trained elsewhere, in ONNX files ---

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
