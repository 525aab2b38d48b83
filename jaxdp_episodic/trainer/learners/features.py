"""Fixed features: a function of one example alone, chosen before anybody's data.

It is applied to every example before a run begins. As it does not depend on the data,
what it makes of an example is as much that example's own as the example was: every
guarantee holds as it stands, and nothing is charged. A function that was fitted to the
private data, or chosen by fits to it that were not private, has no such guarantee.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.files.atomic import LOCK, locked
from jaxdp_episodic.files.column_folder import (
    MANIFEST,
    StoredColumn,
    compare_sums,
    is_complete,
    open_split,
    write_manifest,
    write_rows,
)
from jaxdp_episodic.trainer.config.training_parts import (
    LEAST_SIDE,
    ONNX,
    WAVELETS,
    FeaturesConfig,
)
from jaxdp_episodic.trainer.data.splits import TRAIN
from jaxdp_episodic.trainer.data.stored_features import StoredFeatures
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.learners.backbones import network_features

_VERSION = 1  # of what a cache is compared by
_BATCH = 500  # most rows a call
_MOST_FEATURES = 2**16  # of an example
# Relative difference of a row's features alone and beside others: rounding is below.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class FixedFeatures:
    """A fixed function that is applied to each example before a run.

    For a backbone of any framework, pretrained on *public* data:
    ``FixedFeatures(function, name="…")``, or for images `FixedFeatures.onnx` and
    `FixedFeatures.wavelets`.

    Attributes:
      function: ``(n, *features) array -> (n, D) array``, each row of the result a
        function of that row alone (no batch statistics, no random numbers).
      name: says which function it is, with its version and its weights: what a cache
        was made with, and what a run that is resumed is held to.
      unit_norm: scale each row to norm 1 (a row of zeros stays one).
      settings: plain values that the function depends on, also compared.
      one_by_one: the function takes row by row, so it is called with those that there
        are; else always with 500, so that a row's last bits never depend on how many
        others there are.
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
        self.described()  # refuses settings that JSON cannot hold

    @classmethod
    def wavelets(cls) -> FixedFeatures:
        """Returns the wavelet features of images; see `wavelets.wavelet_features`."""
        return cls(_wavelets, WAVELETS)

    @classmethod
    def onnx(cls, path: str | os.PathLike[str], **settings: Any) -> FixedFeatures:
        """Returns features of images by a network in an ONNX file.

        Args:
          path: the file.
          **settings: those of the table ``features`` of a config, by name.

        Raises:
          ImportError: without the extra ``[onnx]``.
          OSError, TypeError, ValueError: a file that is no network of images, or a
            setting that does not fit to it.
        """
        found = cls.of(FeaturesConfig(kind=ONNX, path=os.fspath(path), **settings))
        assert found is not None
        return found

    @classmethod
    def of(
        cls, config: FeaturesConfig, base: Path | None = None
    ) -> FixedFeatures | None:
        """Returns the features of a config, or None for the examples as they are.

        Paths are relative to ``base``; errors as of `onnx`.
        """
        if config.kind == ONNX:
            function, sha256 = network_features(config, base)
            settings = {**config.network, "sha256": sha256}
            return cls(function, ONNX, settings=settings, one_by_one=True)
        return cls.wavelets() if config.kind == WAVELETS else None

    def described(self) -> dict[str, Any]:
        """Returns what the features are, as plain values.

        Raises:
          TypeError: settings that are no plain values.
        """
        plain = {
            "name": self.name,
            "unit_norm": self.unit_norm,
            "settings": dict(self.settings),
            "version": _VERSION,
        }
        return json.loads(json.dumps(plain))

    def table(self, data: ExampleTable, *, cache: Path | None = None) -> ExampleTable:
        """Returns the table with features in place of the examples' own.

        Args:
          data: the table; its units, targets and owners stay.
          cache: a folder that holds them after the first call, open to its owner only:
            the features of private data are private. One that is damaged, or was made
            of other data or by other settings, is made anew, with a warning. Of data
            on the disk the features stay there, too.

        Raises:
          OSError: a cache that cannot be read or written, or a folder of other files.
          ValueError: features of another number of rows, of no single axis, or not
            finite; a row that changes with the rows beside it.
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
        """The features, some rows at a time."""
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
                        f"features must be at most {_MOST_FEATURES} numbers an "
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
        """What the function makes of up to `_BATCH` rows."""
        number = len(rows)
        if number < _BATCH and not self.one_by_one:
            rest = np.zeros((_BATCH - number, *rows.shape[1:]), rows.dtype)
            rows = np.concatenate([rows, rest])
        try:
            made = np.asarray(self.function(rows))
        except ValueError as error:  # rows of different lengths
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
        with np.errstate(over="ignore"):  # infinity, which is refused
            made = made[:number].astype(np.float32)
        bad = ~np.isfinite(made).all(axis=1)
        if bad.any():
            raise ValueError(
                f"features {self.name!r} must be finite, those of an example are not"
            )
        return made

    def _check_rows_alone(self, rows: np.ndarray, made: np.ndarray) -> None:
        """Refuses a function whose rows depend on those beside them.

        Its features would couple examples of different clip units, and clipping each
        unit's contribution would bound nothing.
        """
        half = len(rows) // 2 + 1
        alone = self._called(rows[:half])
        apart = np.abs(alone - made[:half]).max()
        if apart > _ROUNDING * np.abs(made[:half]).max():
            raise ValueError(
                f"features {self.name!r} of an example must depend on it alone: they "
                "change with the examples beside it, or from call to call (batch "
                "statistics, dropout? switch the model to evaluation)"
            )

    def _cached(self, folder: Path, data: ExampleTable) -> np.ndarray | StoredFeatures:
        """The features in a folder of columns, made if they are not there."""
        settings = json.dumps(self.described(), sort_keys=True)
        made_from = {"settings": settings, "data": data.fingerprint}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder):
            if is_complete(folder):
                try:
                    found = open_split(folder)
                    if found.made_from == made_from:
                        return _opened(found.columns["features"], data)
                    reason = "it is of other data, or of other settings"
                except (OSError, ValueError) as error:
                    reason = str(error)
                warnings.warn(
                    f"cached features {folder} are not used, and made anew: {reason}",
                    stacklevel=4,
                )
            names = {inside.name for inside in folder.iterdir()}
            others = names - {MANIFEST, TRAIN, LOCK}
            if others:
                raise FileExistsError(
                    f"{folder} must be a cache of features, it has {min(others)!r}"
                )
            (folder / MANIFEST).unlink(missing_ok=True)
            self._write(folder / TRAIN / "features.npy", data)
            write_manifest(folder, {TRAIN: (("example",), None)}, made_from=made_from)
            found = open_split(folder)
            return _opened(found.columns["features"], data)

    def _write(self, path: Path, data: ExampleTable) -> None:
        parts = self._made(data.features)
        first = next(parts)
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)  # whoever reads the old one goes on with it
        places = itertools.count(0, _BATCH)
        placed = (
            (np.arange(start, start + len(part)), part)
            for start, part in zip(
                places, itertools.chain([first], parts), strict=False
            )
        )
        write_rows(path, first.dtype, (data.num_examples, first.shape[1]), placed)


def _opened(column: StoredColumn, data: ExampleTable) -> np.ndarray | StoredFeatures:
    """Cached features: on the disk, or in memory and compared with their checksum."""
    if column.shape[0] != data.num_examples:
        raise ValueError(f"it has {column.shape[0]} rows")
    features = StoredFeatures(column)
    if isinstance(data.features, StoredFeatures):
        return features
    compare_sums([column])
    return features[:]


def _wavelets(images: np.ndarray) -> np.ndarray:
    return np.asarray(compiled_wavelets(images.shape[1:])(jnp.asarray(images)))


# Wavelengths as shares of the image's side: 4 and 8 pixels of 28.
_WAVELENGTHS = (1 / 7, 2 / 7)
_ORIENTATIONS = 8  # of a wavelength
_CELLS = 7  # of the pooling grid, along each side
_COEFFICIENTS = 5  # lowest of the cosine transform over these cells
# Samples of a response along each side: two a cell, enough for these wavelengths.
_SAMPLES = 2 * _CELLS
# Contrast, of [0, 1], added to the energy around: keeps moduli of flat regions small.
_FLOOR = 0.03
# Deviation of the Gaussian neighbourhood whose energy divides, in response samples.
_NEIGHBOURHOOD = 0.7


class Filters(NamedTuple):
    """Separable filters: each is one matrix for rows and one for columns.

    F filters, of S scales; a response has 14 x 14 samples, of images (H, W).
    """

    rows: np.ndarray  # (F, 14, H) complex64
    columns: np.ndarray  # (F, 14, W) complex64
    # (S, 14, H) float32: Gaussians, of which the response to a constant is taken off.
    row_envelopes: np.ndarray
    column_envelopes: np.ndarray  # (S, 14, W) float32
    offsets: np.ndarray  # (S,) float32: what a filter responds to a constant
    around: np.ndarray  # (14, 14) float32: means over a neighbourhood
    coefficients: np.ndarray  # (5, 14) float32: pooling, then the cosine transform
    # ((5, H), (5, W)) float32: the same of the image itself.
    image_coefficients: tuple[np.ndarray, np.ndarray]


def wavelet_features(image_shape: tuple[int, ...]) -> Callable[[Array], Array]:
    """Returns the function ``(n, *image_shape) -> (n, 425 * channels)`` of images.

    float32 in and out, rows of unit norm (a row of zeros stays one); integers are read
    as 0 to 255.
    """
    if len(image_shape) != 3 or min(image_shape[:2]) < LEAST_SIDE:
        raise ValueError(
            f"wavelets need images (height, width, channels) of at least {LEAST_SIDE} "
            f"x {LEAST_SIDE} pixels, got features of shape {tuple(image_shape)}"
        )
    filters = make_filters(*image_shape[:2])

    def features(images: Array) -> Array:
        if not jnp.issubdtype(images.dtype, jnp.floating):
            images = images.astype(jnp.float32) / 255.0
        one_channel = functools.partial(_of_one_channel, filters=filters)
        parts = [one_channel(images[..., k]) for k in range(image_shape[2])]
        return unit_rows(jnp.concatenate(parts, axis=1))

    return features


def unit_rows(rows: Array) -> Array:
    """Rows (n, D) scaled to norm 1; a row of zeros stays one."""
    norms = jnp.linalg.norm(rows, axis=1, keepdims=True)
    return rows / jnp.maximum(norms, 1e-12)


def make_filters(height: int, width: int) -> Filters:
    """Returns the filters for images of this size."""
    sizes = height, width
    side = min(sizes)
    rows, columns, envelopes, offsets = [], [], [], []
    for share in _WAVELENGTHS:
        wavelength = share * side
        deviation = wavelength / 2
        both = [
            _sampled(size, _SAMPLES, deviation) / (math.sqrt(2 * math.pi) * deviation)
            for size in sizes
        ]
        envelopes.append(both)
        offsets.append(math.exp(-0.5 * (2 * math.pi * deviation / wavelength) ** 2))
        for angle in math.pi * np.arange(_ORIENTATIONS) / _ORIENTATIONS:
            frequencies = math.sin(angle), math.cos(angle)
            for waves, size, frequency, envelope in zip(
                (rows, columns), sizes, frequencies, both, strict=True
            ):
                phase = 2j * math.pi / wavelength * frequency
                waves.append(envelope * np.exp(phase * _distances(size, _SAMPLES)))
    return Filters(
        np.array(rows, np.complex64),
        np.array(columns, np.complex64),
        np.array([both[0] for both in envelopes], np.float32),
        np.array([both[1] for both in envelopes], np.float32),
        np.array(offsets, np.float32),
        _means(_sampled(_SAMPLES, _SAMPLES, _NEIGHBOURHOOD)).astype(np.float32),
        _spectrum(_SAMPLES),
        (_spectrum(height), _spectrum(width)),
    )


def _of_one_channel(images: Array, *, filters: Filters) -> Array:
    """(n, H, W) to (n, 425)."""
    number, height, width = images.shape
    scales = len(filters.offsets)
    total = len(filters.columns)
    # Columns first, by one product for all filters, then rows.
    waves = [np.real(filters.columns), np.imag(filters.columns)]
    matrix = np.stack(waves).reshape(-1, width).T
    first = (images.reshape(-1, width) @ matrix).reshape(number, height, 2, total, -1)
    along = functools.partial(jnp.einsum, "fij,njfl->nfil")
    real, imaginary = np.real(filters.rows), np.imag(filters.rows)
    re = along(real, first[:, :, 0]) - along(imaginary, first[:, :, 1])
    im = along(real, first[:, :, 1]) + along(imaginary, first[:, :, 0])
    means = jnp.einsum(
        "sij,njk,slk->nsil", filters.row_envelopes, images, filters.column_envelopes
    )
    offset = filters.offsets[:, None, None] * means
    shape = (number, scales, total // scales, _SAMPLES, _SAMPLES)
    energy = jnp.square(re.reshape(shape) - offset[:, :, None])
    energy = energy + jnp.square(im.reshape(shape))
    around = jnp.einsum(
        "ij,nsjk,lk->nsil", filters.around, jnp.sum(energy, axis=2), filters.around
    )
    moduli = jnp.sqrt(energy / (around + _FLOOR**2)[:, :, None])
    maps = jnp.einsum(
        "ij,nsojk,lk->nsoil", filters.coefficients, moduli, filters.coefficients
    )
    rows, columns = filters.image_coefficients
    low = jnp.einsum("ij,njk,lk->nil", rows, images, columns)
    return jnp.concatenate([maps.reshape(number, -1), low.reshape(number, -1)], axis=1)


def _distances(size: int, grid: int) -> np.ndarray:
    """(grid, size): from the middle of each of ``grid`` cells to each pixel."""
    middles = (np.arange(grid) + 0.5) * size / grid - 0.5
    return np.arange(size) - middles[:, None]


def _sampled(size: int, grid: int, deviation: float) -> np.ndarray:
    """(grid, size): a Gaussian around the middle of each of ``grid`` cells."""
    return np.exp(-0.5 * (_distances(size, grid) / deviation) ** 2)


def _means(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(axis=1, keepdims=True)


def _spectrum(size: int) -> np.ndarray:
    """(5, size) float32: means around 7 cells, then their lowest cosine coefficients.

    The transform is the orthonormal DCT-II.
    """
    pooling = _means(_sampled(size, _CELLS, size / _CELLS / 2))
    middles = np.arange(_CELLS) + 0.5
    rows = np.cos(math.pi * middles * np.arange(_COEFFICIENTS)[:, None] / _CELLS)
    rows *= math.sqrt(2 / _CELLS)
    rows[0] /= math.sqrt(2)
    return (rows @ pooling).astype(np.float32)


@functools.cache
def compiled_wavelets(image_shape: tuple[int, ...]) -> Callable[[Array], Array]:
    """Returns the compiled function of `wavelet_features`."""
    return jax.jit(wavelet_features(image_shape))
