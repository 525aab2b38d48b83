"""``jaxdp-episodic sweep``: a grid of settings, evaluated and drawn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from rich.console import Console

from jaxdp_episodic.tools.cli.command import (
    Command,
    Floats,
    Folder,
    Ints,
    Name,
    TomlFile,
    facts,
    option,
    reason,
)
from jaxdp_episodic.tools.plots.pictures import draw
from jaxdp_episodic.tools.sweep.description import read_sweep
from jaxdp_episodic.tools.sweep.engines import RayEngine, on_devices
from jaxdp_episodic.tools.sweep.folder import saved_chunks
from jaxdp_episodic.tools.sweep.run import Outcome, collect, run_sweep


@dataclass
class Sweep(Command):
    """The command ``sweep``."""

    file: TomlFile
    """The sweep: a request as for `epsilon`, with axes in place of numbers."""
    out: Folder
    """Folder for the table and the picture; made if missing."""
    shard: Annotated[Name, option("I/N")] = None
    """Evaluate only part I of N (from 1), for job arrays, which may share DIR."""
    collect: bool = False
    """Only make the table of what job arrays have evaluated."""
    engine: Literal["local", "ray"] = "local"
    """Evaluate on the devices of this machine, or on workers of Ray."""
    ray_address: Annotated[str, option("ADDRESS")] = "local"
    """Address of a Ray cluster; "auto": the one of this machine; "local": start one."""
    ray_cpus: Floats = 1.0
    """CPUs for each task on Ray."""
    ray_gpus: Floats = 0.0
    """GPUs for each task on Ray."""
    ray_retries: Ints = 5
    """How often a task is started again after its worker was lost."""

    _has_warnings = False  # the outcome has those of all chunks

    def _lines(self) -> list[str]:
        try:
            outcome = self._outcome()
            picture = {} if outcome.table is None else {"picture": self._picture()}
        except OSError as error:  # a failing disk leaves intact what is saved
            said = reason(error, str(self.file))
            raise OSError(said + self._left()) from error
        warned = [f"warning: {text}" for text in outcome.warnings]
        return [*facts(_facts(outcome) | picture), *warned]

    def _left(self) -> str:
        saved = saved_chunks(self.out)
        if saved is None:
            return ""
        done, of = saved
        return f"; {done} of {of} chunks are saved, and the same command goes on"

    def _outcome(self) -> Outcome:
        part = None
        if self.shard is not None:
            if self.collect:
                raise ValueError(
                    "--collect takes all shards, so it goes without --shard"
                )
            numbers = re.fullmatch(r"([1-9]\d{0,8})/(\d{1,9})", self.shard)
            if numbers is None or int(numbers[1]) > int(numbers[2]):
                raise ValueError(
                    f"--shard must be I/N with 1 <= I <= N, got {self.shard!r}"
                )
            part = int(numbers[1]), int(numbers[2])
        sweep = read_sweep(self.file)
        if self.collect:
            return collect(sweep, self.out)
        engine = on_devices
        if self.engine == "ray":
            engine = RayEngine(
                address=self.ray_address,
                num_cpus=self.ray_cpus,
                num_gpus=self.ray_gpus,
                max_retries=self.ray_retries,
            )
        console = Console(stderr=True)
        return run_sweep(sweep, self.out, engine=engine, part=part, console=console)

    def _picture(self) -> str:
        """The default picture; a table is worth having without one."""
        try:
            return ", ".join(map(str, draw(self.out)))
        except (ImportError, ValueError) as error:
            return f"none: {error}"


def _facts(outcome: Outcome) -> dict[str, str]:
    chunks = "1 chunk" if outcome.num_chunks == 1 else f"{outcome.num_chunks:,} chunks"
    evaluated = "nothing: it was all there"
    if number := outcome.num_evaluated:
        rate = number / outcome.seconds
        evaluated = f"{number:,} in {outcome.seconds:,.1f} s, {rate:,.0f} a second"
    rows = {"settings": f"{outcome.size:,} in {chunks}", "evaluated": evaluated}
    return rows | ({} if outcome.table is None else {"table": str(outcome.table)})
