"""``jaxdp-episodic log``: what a run was charged, and its log, as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxdp_episodic.accountant.report.ledger_file import refusing, run_file
from jaxdp_episodic.tools.cli.command import Command, option


@dataclass
class Log(Command):
    """The command ``log``."""

    dir: Annotated[tyro.conf.Positional[Path], option("DIR")]
    """The run's folder, or its file run.sqlite."""

    def _lines(self) -> list[str]:
        with refusing(self.dir), run_file(self.dir) as file:
            return [json.dumps(line, allow_nan=False) for line in _said_by(file)]


def _said_by(file: Any) -> Iterator[dict[str, Any]]:
    yield {"kind": "run", **file.facts}
    for name, text, _ in file.steps.values():
        yield {"kind": "step", "name": name, "step": json.loads(text)}
    for opening in file.openings:
        yield {"kind": "opening", "charged": opening.charged, **opening.environment}
    for charge in file.charges():
        yield {
            "kind": "charge",
            "number": charge.number,
            "step": file.steps[charge.step][0],
            "process": charge.session,
            "hash": charge.hash.hex(),
        }
    for record in file.log():
        yield {"kind": "log", **record}
