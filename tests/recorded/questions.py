"""Ask the recorded questions, and hold answers against those that were recorded."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import jaxdp_episodic as jde
from jaxdp_episodic.accountant._engine import using_engine
from jaxdp_episodic.accountant.describe.mechanisms import RELEASES
from jaxdp_episodic.accountant.describe.serialization import spec_from_dict

FOLDER = pathlib.Path(__file__).parent
# Kinds whose answers by "exact" are exact to 1e-6; those of the others are upper bounds
# within 1e-4.
EXACT = (
    *("sampled", "swapped", "antipodal", "zeroed", "without_replacement"),
    *("grouped", "composed", "population", "shuffled"),
    *("approximate_dp", "zero_concentrated", "renyi_dp"),
)
EXACT_WITHIN = 1e-6
ELSEWHERE_WITHIN = 1e-4
# The relative width at which `delta_interval` aims; in epsilon far less than 1e-4.
DELTA_WITHIN = 1e-3
# Below 1e-3 epsilon is exact to an absolute error, in nats; ends are apart by 1e-7.
SMALL_EPSILON = 1e-9
SMALL_WIDTH = 1e-7
# Shares of a calibrated noise that are shown to be too little.
_LESS_NOISE = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1)

Row = dict[str, Any]


def recorded(kind: str) -> list[Row]:
    """Returns the questions of a kind, with their answers."""
    return json.loads(gzip.decompress((FOLDER / f"{kind}.json.gz").read_bytes()))


def ask(question: str, step: Row, given: Row, *, ends: str = "none") -> Row:
    """Returns ``value`` with certified ends, as lists; or ``error``, its type's name.

    Args:
      question: "epsilon", "delta", "epsilon by rdp", "rdp" or "calibrate".
      step: as `spec_to_dict` writes it.
      given: keywords of the question, lists.
      ends: "all", "none", or those "needed", where the answer is no exact one; else
        ``lower`` and ``upper`` are 0. ``lower`` of a calibrated noise is one that is
        certified to be too little.
    """
    kinds = (jde.GaussianStep, jde.ComposedSteps, *RELEASES)
    spec = spec_from_dict(kinds, step)
    with using_engine("numpy"):
        try:
            answer = _ask(question, spec, given, ends)
        except NotImplementedError as error:
            return {"error": type(error).__name__}
    return {key: np.asarray(value).tolist() for key, value in answer.items()}


def _ask(question: str, step: Any, given: Row, ends: str) -> Row:
    if question == "rdp":
        return {"value": jde.rdp(step, **given)}
    if question == "epsilon by rdp":
        return {"value": jde.epsilon(step, **given, method="rdp")}
    if question == "calibrate":
        noise = np.asarray(jde.calibrate_noise_multiplier(step, **given))
        less = {} if ends == "none" else {"lower": _too_little(step, given, noise)}
        return {"value": noise, **less}
    value, info = getattr(jde, question)(step, **given, return_info=True)
    found = {"value": value, "certified": info.is_certified_bound}
    if ends == "none":
        return found
    wanted = info.is_certified_bound if ends == "needed" else True
    # Of no steps the ends are 0, at once.
    counts = np.where(wanted, given["num_steps"], 0)
    interval = getattr(jde, f"{question}_interval")
    found["lower"], found["upper"] = interval(step, **{**given, "num_steps": counts})
    return found


def _too_little(step: Any, given: Row, noise: np.ndarray) -> np.ndarray:
    """The largest noise of a few below one that is certified to be too little."""
    known = np.zeros_like(noise)
    for share in _LESS_NOISE:
        open_ = (known == 0) & (noise > 0) & np.isfinite(noise)
        if not np.any(open_):
            break
        less = np.where(open_, noise * (1 - share), 1e3)
        changed = dataclasses.replace(step, noise_multiplier=less)
        lower, _ = jde.epsilon_interval(
            changed, delta=given["delta"], num_steps=given["num_steps"]
        )
        known = np.where(open_ & (lower > given["epsilon"]), less, known)
    return known


def compared(kind: str, row: Row, found: Row) -> Iterator[tuple[str, np.ndarray]]:
    """Yields rules with whether each answer that was found keeps to them."""
    yield "refused alike", np.asarray(row.get("error") == found.get("error"))
    if "error" in row or "error" in found:
        return
    old, new = np.asarray(row["value"]), np.asarray(found["value"])
    certified = np.asarray(row.get("certified", False))
    is_epsilon = row["question"] in ("epsilon", "epsilon by rdp")
    small = SMALL_EPSILON if is_epsilon else 0.0
    width = DELTA_WITHIN if row["question"] == "delta" else ELSEWHERE_WITHIN
    near = EXACT_WITHIN if kind in EXACT else width
    same = new == old  # both inf
    if "lower" in row:
        yield "not below the certified lower end", new >= row["lower"]
    low = old * (1 - EXACT_WITHIN) - small
    yield "not below the exact answer", same | certified | (new >= low)
    yield "not above", same | certified | (new <= old * (1 + near) + small)
    # Answers that were certified ends are so again, of another lattice.
    yield "mostly as narrow", same | (new <= old * (1 + width) + small)
    if "upper" in found and "upper" in row:
        low, up = np.asarray(found["lower"]), np.asarray(found["upper"])
        old_low, old_up = np.asarray(row["lower"]), np.asarray(row["upper"])
        asked = old_up > 0
        yield "intervals overlap", ~asked | ((up >= old_low) & (low <= old_up))
        narrow = up <= old_up * (1 + width) + (SMALL_WIDTH if is_epsilon else 0.0)
        yield "mostly as narrow", ~asked | narrow


def worst(row: Row, found: Row) -> tuple[float, float]:
    """How far answers are below and above those recorded, relative, at most."""
    if "error" in row or "error" in found:
        return 0.0, 0.0
    old, new = np.asarray(row["value"]), np.asarray(found["value"])
    usual = np.isfinite(old) & np.isfinite(new) & (old > 0)
    change = (new[usual] - old[usual]) / np.maximum(old[usual], 1e-300)
    return float(np.min(change, initial=0)), float(np.max(change, initial=0))
