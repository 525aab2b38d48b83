"""``jaxdp-episodic init``: from data to a training config that runs."""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, Union

import tyro

from jaxdp_episodic.files.atomic import owner_only
from jaxdp_episodic.tools.cli.messages import (
    USER_ERRORS,
    Name,
    Whole,
    option,
    reported,
    waiting,
)
from jaxdp_episodic.tools.cli.process import PROGRAM
from jaxdp_episodic.tools.plan.first_config import (
    DELTA,
    EPSILON,
    Wishes,
    first_config,
)
from jaxdp_episodic.tools.plan.source import described_source
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.data.layouts import STORED
from jaxdp_episodic.trainer.data.splits import TRAIN

_Names = tuple[str, ...]
_NOTHING_HELD_OUT = (
    "nothing, so nothing is chosen and nothing is scored: the last stage is released "
    "as it comes, be it worse than the features"
)
_OF_SOURCE = ("owner", "size", "grey", "label", "features", "target")


@dataclass(frozen=True)
class Init:
    """Read data, and write a commented config for them that runs as it is.

    What it counts in the data and writes down is marked: private, unless it was public
    before. Nothing is trained, and nothing released.
    """

    source: Annotated[tyro.conf.Positional[Path], option("SOURCE")]
    """A folder with a folder of images for each class (or Omniglot's, mini-ImageNet's),
    an .npz, .csv or .parquet file, or a folder made by `data import`."""
    out: Annotated[Path, option("FILE.toml")] = Path("train.toml")
    """The config, which must not exist."""
    epsilon: Annotated[float, option("FLOAT")] = EPSILON
    """The target."""
    delta: Annotated[float, option("FLOAT")] = DELTA
    """The target."""
    unit: Annotated[Name, option("NAME")] = None
    """What is protected: "example", "class" (or the column of tasks), or "person", who
    is known by --owner; default: one example."""
    relation: Annotated[
        Union[Literal["add_remove", "zero_out"], None],  # noqa: UP007
        option("NAME"),
    ] = None
    """One more or less, or one of public slots filled or not; default: zero_out where a
    third of the episodes or more find no empty slot."""
    population: Annotated[Whole, option("INT")] = None
    """Public number of examples that no class has fewer than (add_remove) or more than
    (zero_out); default: counted in the data, and marked."""
    ways: Annotated[Whole, option("INT")] = None
    """Classes an episode; default: 5, or as many as there are."""
    shots: Annotated[Whole, option("INT")] = None
    """Labelled examples of each class; default: 1, of a task to predict numbers 4."""
    size: Annotated[Whole, option("INT")] = None
    """Side to which pictures are brought; default: 28."""
    grey: bool = False
    """Pictures in one channel; default: if those looked at have no colour."""
    owner: Annotated[Name, option("NAME")] = None
    """Whose an example is: a column, an array, or of files' names a regular expression
    with one group."""
    label: Annotated[Name, option("NAME")] = None
    """Of a table: the column of classes, or with --target of tasks; default: the one
    whose values repeat."""
    features: Annotated[_Names, option("NAME ...")] = ()
    """Of a table: columns of numbers; default: all others that are."""
    target: Annotated[Name, option("NAME")] = None
    """Of a table: column of numbers to predict; default: classes are told apart."""

    def run(self) -> int:
        """Writes the config; returns the exit code."""
        return reported(self.source, self._written, says_warnings=True)

    def _written(self) -> list[str]:
        if self.out.exists():
            raise FileExistsError(f"{self.out} exists; name another file by --out")
        given = {name: getattr(self, name) for name in _OF_SOURCE}
        options = {  # 0 and "" are given, too, and refused by name
            name: value
            for name, value in given.items()
            if value is not None and value is not False and value != ()
        }
        source = described_source(self.source, self.out, **options)
        wishes = {field.name: getattr(self, field.name) for field in fields(Wishes)}
        text, said = first_config(source, Wishes(**wishes))
        with waiting("checking it as training would (all data are read)"):
            _check(text, self.out.parent)
        with open(self.out, "x", encoding="utf-8", opener=owner_only) as file:
            file.write(text)  # it holds private numbers
        lines = [f"source      {self.source} ({source.layout})"]
        for split, part in source.parts.items():
            units = (f"{name} {number:,}" for name, number in part.num_units.items())
            lines.append(f"{split:<12}{', '.join(units)}")
        if set(source.parts) == {TRAIN}:
            lines.append(f"held out    {_NOTHING_HELD_OUT}; {_give(source.layout)}")
        for key in ("label", "groups", "features"):
            if key not in source.notes:
                continue
            names = source.table[key]
            shown = names if isinstance(names, str) else ", ".join(names)
            lines.append(f"{key:<12}{shown} ({source.notes[key]})")
        return [
            *lines,
            *said,
            f"written     {self.out}; read its comments, then",
            f"next        {PROGRAM} train {shlex.quote(str(self.out))} --out runs/1",
        ]


def _give(layout: str) -> str:
    """What would have a part held out."""
    if layout == STORED:
        return "import the data with --validation and --test"
    return (
        "give the classes names (an array 'classes' or 'labels'), or paths of other "
        "data as validation and test under [data], and an [evaluation]"
    )


def _check(text: str, base: Path) -> None:
    """Refuses a config as training would, before anything is written.

    Raises:
      ValueError: what training would refuse, whatever it is.
    """
    # Imported here: Flax costs a second, which no help should pay.
    from jaxdp_episodic.trainer.run.assemble import checked_run

    fields = {"type": "TrainingConfig", **tomllib.loads(text)}
    try:
        checked_run(TrainingConfig.from_dict(fields, where="config"), base)
    except USER_ERRORS as error:
        raise ValueError(
            f"nothing is written, as training would refuse it: {error}; change the "
            "data, or what is wished of them (--population, --relation, --shots, "
            "--ways, --unit, --epsilon)"
        ) from error
