"""Fixed features, as a training config says them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.spec import Spec, check_flags, set_whole_numbers

NONE = "none"
WAVELETS = "wavelets"
ONNX = "onnx"
FEATURES = (NONE, WAVELETS, ONNX)
# Features of a channel: 16 Gabor filters and the image, 5 x 5 coefficients of each.
NUM_WAVELETS = 425
LEAST_SIDE = 8  # pixels of an image that has wavelets

RGB = "rgb"
BGR = "bgr"
GREY = "grey"
NUM_CHANNELS = {RGB: 3, BGR: 3, GREY: 1}
MEAN = "mean"
MAX = "max"
POOLS = (MEAN, MAX, NONE)
# What settings of a network are if a config leaves them out; None: see there.
_OF_NETWORKS: dict[str, Any] = {
    "path": None,
    "output": None,
    "size": None,
    "channels": RGB,
    "channels_last": False,
    "mean": 0.0,
    "std": 1.0,
    "pool": MEAN,
    "grid": 1,
}
_MOST_PIXELS = 2048  # of a side
_MOST_PARTS = 64  # of a side


@dataclass(frozen=True, eq=False, kw_only=True)
class FeaturesConfig(Spec):
    """Fixed features of the examples; see `FixedFeatures`.

    Attributes:
      kind: "none" (the examples as they are), "wavelets" or "onnx" (both of images).
      cache: folder for the features of each split; they are as private as the data.
        None: ``features`` in the run's folder.
      path: of "onnx", like the rest: the file of the network.
      output: name of a value in the network; None: its first output.
      size: height and width that images are brought to, or one number for both; None:
        those that the file states, or else the images' own.
      channels: that the network takes: "rgb" (by default), "bgr" or "grey".
      channels_last: it takes (1, height, width, channels), and its output is likewise,
        in place of (1, channels, height, width). Default: false.
      mean: subtracted from pixels in [0, 1], of each channel or for all. Default: 0.
      std: then divides them; a negative one inverts them. Default: 1.
      pool: over positions, if the output has any: "mean" (by default), "max", or "none"
        (each number is a feature).
      grid: parts that each axis of positions is cut into, to be pooled apart; by
        default 1.
    """

    kind: str = NONE
    cache: str | None = None
    path: str | None = None
    output: str | None = None
    size: tuple[int, ...] | None = None
    channels: str | None = None
    channels_last: bool | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    pool: str | None = None
    grid: int | None = None

    def __post_init__(self) -> None:
        _validation.choice("kind", self.kind, FEATURES)
        for name in ("cache", "path", "output"):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, str) or not value or "\0" in value
            ):
                shown = _validation.shown(value)
                raise TypeError(f"{name} must be a non-empty string, got {shown}")
        given = [name for name in _OF_NETWORKS if getattr(self, name) is not None]
        if self.kind == ONNX:
            self._set_network()
        elif given:
            raise ValueError(
                f"{given[0]} is for kind={ONNX!r}, got it with kind={self.kind!r}"
            )

    def _set_network(self) -> None:
        """Checks the settings of a network, and fills in what is left out."""
        if self.path is None:
            raise ValueError(f"path must be given with kind={ONNX!r}: an ONNX file")
        for name, default in _OF_NETWORKS.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        channels = _validation.choice("channels", self.channels, NUM_CHANNELS)
        _validation.choice("pool", self.pool, POOLS)
        check_flags(self, "channels_last")
        set_whole_numbers(self, "grid", maximum=_MOST_PARTS)
        if self.pool == NONE and self.grid != 1:
            raise ValueError(f"grid is for a pool other than {NONE!r}, got {self.grid}")
        if self.size is not None:
            object.__setattr__(self, "size", _sides(self.size))
        for name in ("mean", "std"):
            numbers = _of_channels(name, getattr(self, name), NUM_CHANNELS[channels])
            object.__setattr__(self, name, numbers)
        if self.std is not None and 0 in self.std:
            raise ValueError(f"std must not be 0, got {self.std}")

    @property
    def network(self) -> dict[str, Any]:
        """The settings of a network, but for the file's place."""
        return {n: getattr(self, n) for n in _OF_NETWORKS if n != "path"}


def _sides(value: Any) -> tuple[int, int]:
    """Height and width."""
    sides = _validation.integer_array("size", value, minimum=1)
    if sides.shape not in ((), (2,)) or sides.max() > _MOST_PIXELS:
        raise ValueError(
            f"size must be one number or [height, width], at most {_MOST_PIXELS}, got "
            f"{_validation.shown(value)}"
        )
    height, width = np.broadcast_to(sides, 2).tolist()
    return height, width


def _of_channels(name: str, value: Any, channels: int) -> tuple[float, ...]:
    """One number for each channel, from as many or one."""
    numbers = _validation.real_array(name, value)
    if numbers.shape not in ((), (1,), (channels,)) or np.abs(numbers).max() > 1e6:
        raise ValueError(
            f"{name} must be one number or {channels}, one a channel, in [-1e6, 1e6], "
            f"got {_validation.shown(value)}"
        )
    return tuple(np.broadcast_to(numbers, channels).tolist())
