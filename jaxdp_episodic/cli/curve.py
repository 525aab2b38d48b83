"""``jaxdp-episodic curve``: the whole privacy curve of one run, as a picture."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxdp_episodic.cli.answer_text import remarks_on, steps_of
from jaxdp_episodic.cli.messages import (
    USER_ERROR,
    USER_ERRORS,
    TomlFile,
    complain,
    printable,
    reason,
    waiting,
    warnings_of,
)
from jaxdp_episodic.cli.process import ended_by_sigterm
from jaxdp_episodic.plots.curve_plot import plot_curve, summary
from jaxdp_episodic.requests.request import EpsilonRequest
from jaxdp_episodic.requests.request_file import read_request


@dataclass(frozen=True)
class Curve:
    """Draw a run's whole privacy curve, and what an attacker could do with it."""

    file: TomlFile
    """The request: as for `epsilon`; its delta or epsilon is not used."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.png")]
    """The picture, .png or .svg; its numbers go beside it, into a .json."""
    num_steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Takes the place of the file's number of steps."""
    method: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Takes the place of the file's method: exact, pld or rdp."""

    def run(self) -> int:
        """Draws what a request describes; returns the exit code."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                request = read_request(
                    self.file,
                    EpsilonRequest,
                    num_steps=self.num_steps,
                    method=self.method,
                )
                with ended_by_sigterm(), waiting("privacy curve") as say:
                    curve = plot_curve(
                        request.step,
                        self.out,
                        num_steps=request.num_steps,
                        method=request.method,
                        on_part=lambda part, number, total: say(
                            f"{number} of {total}: {part}"
                        ),
                    )
            except USER_ERRORS as error:
                complain(f"{self.file}: {reason(error, self.file)}")
                return USER_ERROR
        first = steps_of(request)[0]
        facts = summary(curve) | {
            "protected": f"one {first.privacy_unit} ({first.neighboring_relation})",
            "written": f"{self.out}, {self.out.with_suffix('.json')}",
        }
        lines = [f"{name:<23}  {value}" for name, value in facts.items()]
        lines += [f"warning: {w}" for w in [*warnings_of(caught), *remarks_on(request)]]
        print(printable("\n".join(lines), keep="\n"))
        return 0
