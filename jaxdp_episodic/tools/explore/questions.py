"""Answers the page's questions, which are requests in dictionary form.

As a program it answers each line of JSON by another one.
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import using_engine
from jaxdp_episodic.accountant.describe import designs
from jaxdp_episodic.accountant.describe.designs import PeopleBlocks
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.accountant.questions.api import epsilon, epsilon_interval
from jaxdp_episodic.accountant.questions.gdp import upper_delta
from jaxdp_episodic.accountant.report.report import tree_levels
from jaxdp_episodic.accountant.report.sentences import downward, upward
from jaxdp_episodic.files.json_file import parse_json, plain
from jaxdp_episodic.files.toml_file import to_toml
from jaxdp_episodic.tools.plots.curve import SMALLEST_DELTA, privacy_curve, summary
from jaxdp_episodic.tools.requests import request as requests

# Epsilons (nats) for which the page shows the noise, besides the user's target.
TARGETS = (1.0, 2.0, 4.0, 8.0)
SMALLEST_TARGET = 1e-6  # nats; a search for the noise of a smaller one takes seconds
_POINTS_OF_A_RUN = 24  # numbers of steps at which epsilon is shown
_POINTS_OF_A_CURVE = 81  # epsilons at which delta is shown
_DIGITS = 5  # of printed numbers
_FIELD = re.compile(r"request((?:\.\w+|\[\d+\])*): (?:(\w+)\b)?")


def start(path: Path | None) -> dict[str, Any]:
    """Returns the first design (None: the README's), and examples to choose from."""
    request = requests.EpsilonRequest(step=_EXAMPLES[0], num_steps=300, delta=1e-5)
    if path is not None:
        request = _checked(requests.read_request(path, requests.EpsilonRequest))
    examples = {type(step.design).__name__: step.to_dict() for step in _EXAMPLES}
    return {
        "name": "omniglot" if path is None else path.stem,
        "request": plain(request.to_dict()),
        "examples": examples,
        "people": _PEOPLE,
        "schemes": {type(scheme).__name__: scheme.to_dict() for scheme in _SCHEMES},
    }


def answer(part: str, question: Any) -> dict[str, Any]:
    """Returns one part of the page's results for a design, as JSON."""
    try:
        with using_engine("numpy"), _validation.recorded_warnings() as caught:
            table = _validation.instance("question", question, Mapping, "a table")
            fields = table.get("request")
            request = requests.EpsilonRequest.from_dict(fields, where="request")
            content = PARTS[part](_checked(request), table.get("epsilon"))
    except (TypeError, ValueError, NotImplementedError, MemoryError) as error:
        # The library takes arrays, but the page does not.
        text = _validation.one_line(error).replace(" or an array of numbers", "")
        found, place = _FIELD.match(text), ""
        if found is not None:  # the message names a field
            place = ".".join(filter(None, (found[1].removeprefix("."), found[2])))
            text = text[text.index(": ") + 2 :]
        return {"error": {"place": place, "message": text}}
    caveats = [*caught, *requests.caveats_on(request)]
    return plain({**content, "remarks": list(dict.fromkeys(caveats))})


def reply(line: bytes) -> dict[str, Any]:
    """Returns the answer to a line of JSON: the part's name, and the question."""
    part, question = parse_json(line, allow_infinity=False)
    return answer(part, question)


def _checked(request: requests.EpsilonRequest) -> requests.EpsilonRequest:
    """Returns the request; refuses one that the page cannot show."""
    if not isinstance(request.step, GaussianStep):
        raise NotImplementedError(
            "the page shows runs of one GaussianStep, got a "
            f"{type(request.step).__name__}; `epsilon` and `curve` take all runs"
        )
    if request.delta is None:
        raise ValueError("delta must be given, as the page shows epsilons")
    if request.shape != ():
        raise ValueError(
            "every field must be a scalar, as the page shows one setting, got fields "
            f"of shape {request.shape}"
        )
    return request


# The following functions take checked requests, with single numbers as fields.


def _epsilon(request: Any, _: Any) -> dict[str, Any]:
    """Epsilon by the request's method."""
    value, info = request.answer_with_info()
    nature = "certified upper bound" if info.is_certified_bound else request.nature
    return {"epsilon": value, "text": upward(float(value), _DIGITS), "nature": nature}


def _levels(request: Any, _: Any) -> dict[str, Any]:
    """Epsilon of every level that may be protected, with its certified interval."""
    run: dict[str, Any] = {"num_steps": request.num_steps, "delta": request.delta}
    rows = []
    step = request.step
    people = (designs.PERSON,) if step.privacy_unit == designs.PERSON else ()
    is_copied = step.privacy_unit == designs.ORIGINAL
    levels = tree_levels(step) if is_copied else step.design.level_names
    for level in (*people, *levels):
        row: dict[str, Any] = {"level": level}
        rows.append(row)
        try:
            bounds = step.people if level == step.privacy_unit else None
            other = dataclasses.replace(step, privacy_unit=level, people=bounds)
            value = float(epsilon(other, **run))
            row |= {"epsilon": value, "text": upward(value, _DIGITS)}
            lower, upper = (float(end) for end in epsilon_interval(other, **run))
            ends = f"{downward(lower, _DIGITS)} to {upward(upper, _DIGITS)}"
            row |= {"lower": lower, "upper": upper, "ends": ends}
        except (ValueError, NotImplementedError) as error:
            row["message"] = str(error)
    return {"levels": rows}


def _run(request: Any, _: Any) -> dict[str, Any]:
    """Epsilon along the run; for epochs only at their ends, where they are charged."""
    last, scheme = int(request.num_steps), designs.epoch_scheme(request.step.design)
    every = 1 if scheme is None else int(np.asarray(scheme.steps_per_epoch))
    # Denser at the beginning, as epsilon grows like the square root of the steps.
    parts = np.linspace(0, 1, _POINTS_OF_A_RUN) ** 2
    wholes = (last // every * parts).round() * every
    steps = np.unique(np.append(wholes, last)).astype(np.int64)
    values = epsilon(
        request.step, delta=request.delta, num_steps=steps, method=request.method
    )
    return {"num_steps": steps, "epsilon": values}


def _curve(request: Any, _: Any) -> dict[str, Any]:
    """Delta against epsilon, from 0 to where delta is SMALLEST_DELTA."""
    run: dict[str, Any] = {"num_steps": request.num_steps, "method": request.method}
    end = float(epsilon(request.step, delta=SMALLEST_DELTA, **run))
    epsilons = np.linspace(0, end if 0 < end < np.inf else 1.0, _POINTS_OF_A_CURVE)
    deltas = upper_delta(request.step, epsilon=epsilons, **run)
    return {"epsilon": epsilons, "delta": deltas}


def _attack(request: Any, _: Any) -> dict[str, Any]:
    """Upper bounds on the success of an attacker."""
    curve = privacy_curve(
        request.step, num_steps=request.num_steps, method=request.method, methods=()
    )
    return {
        "false_positive_rate": curve.false_positive_rate,
        "true_positive_rate": curve.true_positive_rate,
        "facts": summary(curve),
    }


def _noise(request: Any, target: Any) -> dict[str, Any]:
    """The smallest noise for some targets, and for the user's."""
    own = _validation.single("epsilon", _validation.positive_array("epsilon", target))
    if own < SMALLEST_TARGET:
        raise ValueError(
            f"epsilon must be at least {SMALLEST_TARGET:g} on the page, got {own!r}; "
            "`calibrate` on the command line takes any above 0"
        )
    noises = requests.CalibrationRequest(
        step=request.step,
        calibrate="noise_multiplier",
        epsilon=sorted({*TARGETS, float(own)}),
        delta=request.delta,
        num_steps=request.num_steps,
        method=request.method,
    )
    found = np.asarray(noises.answer())
    texts = [upward(float(value), _DIGITS) for value in found]
    return {"targets": noises.epsilon, "noise": found, "texts": texts}


PARTS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "epsilon": _epsilon,
    "levels": _levels,
    "run": _run,
    "curve": _curve,
    "noise": _noise,
    "attack": _attack,
    "toml": lambda request, _: {"toml": to_toml(plain(request.to_dict()))},
}

_EPISODES = designs.Poisson(designs.EPISODE, sampling_probability=0.2)
_CLASSES = designs.WithoutReplacement(designs.CLASS, size=5, population=1_623)
_DRAWN = designs.WithoutReplacement(designs.EXAMPLE, size=4, population=20)
_OF_TASKS = designs.MultistageSampling(
    designs.Poisson("task", sampling_probability=0.1),
    designs.WithoutReplacement(designs.CLASS, size=5, population=20),
    designs.WithoutReplacement(designs.EXAMPLE, size=10, population=50),
)
_ONE_EPISODE = designs.MultistageSampling(_CLASSES, _DRAWN)
_EXAMPLES = (
    GaussianStep(
        designs.GroupedClasses(
            num_classes=1_623, ways=5, episodes=_EPISODES, examples=_DRAWN
        ),
        noise_multiplier=2.0,
    ),
    GaussianStep(_OF_TASKS, noise_multiplier=2.0, clip_unit="task"),
    GaussianStep(
        designs.IndependentEpisodes(_ONE_EPISODE, num_episodes=65), noise_multiplier=2.0
    ),
    GaussianStep(
        PeopleBlocks(
            num_people=20_000,
            people_per_block=20,
            episodes=designs.Poisson(designs.EPISODE, sampling_probability=0.01),
        ),
        noise_multiplier=2.0,
    ),
)
# First values of the bounds of a person.
_PEOPLE = {"examples": 1, "classes": 100, "tasks": 10}
_SCHEMES = (
    designs.Poisson("level", sampling_probability=0.1),
    designs.WithoutReplacement("level", size=10, population=100),
    designs.RandomAllocation("level", steps_per_epoch=10),
    designs.ShuffledEpochs("level", steps_per_epoch=10),
)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends it
    for line in sys.stdin.buffer:
        print(json.dumps(reply(line), allow_nan=False), flush=True)
