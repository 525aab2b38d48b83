"""``jaxdp-episodic sweep``: a grid of settings, evaluated and drawn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console

from jaxdp_episodic.tools.cli.messages import Name, TomlFile, option, reason, reported
from jaxdp_episodic.tools.plots.pictures import draw
from jaxdp_episodic.tools.sweep.description import read_sweep
from jaxdp_episodic.tools.sweep.engines import Engine, RayEngine, on_devices
from jaxdp_episodic.tools.sweep.folder import saved_chunks
from jaxdp_episodic.tools.sweep.run import Outcome, collect, run_sweep


@dataclass(frozen=True)
class Sweep:
    """Evaluate a grid of settings into a table and a picture.

    May be killed at any time: the same command goes on where it was.
    """

    file: TomlFile
    """The sweep: a request as for `epsilon`, and axes in the place of numbers."""
    out: Annotated[Path, option("DIR")]
    """Folder for the table and the picture; made if missing."""
    shard: Annotated[Name, option("I/N")] = None
    """Only the I-th of N parts (from 1), for job arrays; they may share DIR."""
    collect: bool = False
    """Only make the table of what job arrays have evaluated."""
    engine: Literal["local", "ray"] = "local"
    """Who evaluates: the devices of this machine, or workers of Ray."""
    ray_address: Annotated[str, option("ADDRESS")] = "local"
    """Of a cluster; "auto": the one this machine is in; "local": start one here."""
    ray_cpus: Annotated[float, option("FLOAT")] = 1.0
    """CPUs for each task on Ray."""
    ray_gpus: Annotated[float, option("FLOAT")] = 0.0
    """GPUs for each task on Ray."""
    ray_retries: Annotated[int, option("INT")] = 5
    """How often a task is started again whose worker was lost."""

    def run(self) -> int:
        """Evaluates what is missing; returns the exit code."""
        return reported(self.file, self._evaluated, interrupted=self._saved)

    def _evaluated(self) -> list[str]:
        """Evaluates and draws, and returns what to say."""
        try:
            outcome = self._outcome()
            lines = _lines(outcome)
            if outcome.table is not None:
                lines.append(_drawn(self.out))
        except OSError as error:  # a failing disk leaves intact what is saved
            raise OSError(reason(error, self.file) + self._saved()) from error
        return lines

    def _outcome(self) -> Outcome:
        part = _part(self.shard)
        if self.collect and part:
            raise ValueError("--collect takes all shards, so it goes without --shard")
        sweep = read_sweep(self.file)
        if self.collect:
            return collect(sweep, self.out)
        console = Console(stderr=True)
        return run_sweep(
            sweep, self.out, engine=self._engine(), part=part, console=console
        )

    def _engine(self) -> Engine:
        if self.engine == "local":
            return on_devices
        return RayEngine(
            address=self.ray_address,
            num_cpus=self.ray_cpus,
            num_gpus=self.ray_gpus,
            max_retries=self.ray_retries,
        )

    def _saved(self) -> str:
        """What an interruption, or a failing disk, has left intact."""
        saved = saved_chunks(self.out)
        if saved is None:
            return ""
        done, of = saved
        return f"; {done} of {of} chunks are saved, and the same command goes on"


def _part(text: str | None) -> tuple[int, int] | None:
    """The two numbers of "I/N"."""
    if text is None:
        return None
    numbers = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if numbers is None:
        raise ValueError(f"--shard must be I/N, for example 3/8, got {text!r}")
    return int(numbers[1]), int(numbers[2])


def _lines(outcome: Outcome) -> list[str]:
    """What was done."""
    chunks = "1 chunk" if outcome.num_chunks == 1 else f"{outcome.num_chunks:,} chunks"
    lines = [f"settings   {outcome.size:,} in {chunks}"]
    if outcome.num_evaluated:
        rate = outcome.num_evaluated / outcome.seconds
        lines.append(
            f"evaluated  {outcome.num_evaluated:,} in {outcome.seconds:,.1f} s, "
            f"{rate:,.0f} a second"
        )
    else:
        lines.append("evaluated  nothing: it was all there")
    if outcome.table is not None:
        lines.append(f"table      {outcome.table}")
    lines += [f"warning: {warning}" for warning in outcome.warnings]
    return lines


def _drawn(folder: Path) -> str:
    """Draws the default picture; a table is worth having without one."""
    try:
        files = draw(folder)
    except (ImportError, ValueError) as error:
        return f"picture    none: {error}"
    return f"picture    {', '.join(map(str, files))}"
