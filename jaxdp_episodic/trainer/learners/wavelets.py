"""Wavelet features of an image: fixed before any data, so that they cost no privacy.

Moduli of Gabor responses, divided by the energy of all orientations around, and the
low-passed image; of each the lowest cosine coefficients on a grid of 7 x 7 cells.

Reference: Bruna and Mallat (2013), arXiv:1203.1513 (moduli of wavelets, averaged);
Dalal and Triggs (2005), doi:10.1109/CVPR.2005.177 (division by the energy around).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic.trainer.config.training_parts import LEAST_SIDE

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
