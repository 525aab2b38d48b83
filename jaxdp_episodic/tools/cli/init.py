"""``jaxdp-episodic init``: from data to a training config that runs."""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro

from jaxdp_episodic.files.atomic import owner_only
from jaxdp_episodic.files.toml_file import to_toml
from jaxdp_episodic.tools.cli.command import (
    USER_ERRORS,
    Command,
    File,
    Floats,
    Name,
    Names,
    Whole,
    facts,
    option,
    waiting,
)
from jaxdp_episodic.tools.cli.plan import relocated
from jaxdp_episodic.tools.cli.process import PROGRAM
from jaxdp_episodic.tools.plan.first_config import DELTA, EPSILON, Wishes, first_config
from jaxdp_episodic.tools.plan.question import plan_around
from jaxdp_episodic.tools.plan.source import described_source
from jaxdp_episodic.tools.train.search_space import search_around
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.data.layouts import STORED
from jaxdp_episodic.trainer.data.splits import TRAIN

_OF_SOURCE = ("owner", "size", "grey", "label", "features", "target", "rotations")
_HELD_OUT = ("validation", "test")


@dataclass
class Init(Command):
    """The command ``init``."""

    #: The data: a folder with a folder of images for each class, a folder of Omniglot
    #: or mini-ImageNet, an .npz, .csv or .parquet file, or a folder that `data import`
    #: wrote.
    source: Annotated[tyro.conf.Positional[Path], option("SOURCE")]
    #: The config to write. The file must not exist yet.
    out: Annotated[Path, option("FILE.toml")] = Path("train.toml")
    #: Target epsilon.
    epsilon: Floats = EPSILON
    #: Target delta.
    delta: Floats = DELTA
    #: Protected unit: "example" (the default), "class" (or the column of tasks),
    #: or "person", which needs --owner.
    unit: Name = None
    #: How neighbouring data sets differ. add_remove: one unit is added or removed.
    #: zero_out: one slot of a public number of slots is emptied or filled. Default:
    #: zero_out if at least a third of all episodes would draw no empty slot.
    relation: Annotated[
        Union[Literal["add_remove", "zero_out"], None],  # noqa: UP007
        option("NAME", may_lack=True),
    ] = None
    #: Public bound on the examples of a class: a lower bound for add_remove, an upper
    #: bound for zero_out. Default: counted in the data, and marked as private.
    population: Whole = None
    #: Classes per episode. Default: 5, or fewer if the data have too few classes.
    ways: Whole = None
    #: Labelled examples per class. Default: 1, or 4 where numbers are predicted.
    shots: Whole = None
    #: Height and width of the images after scaling, in pixels. Default: 28.
    size: Whole = None
    #: Convert images to grey. Without it, they are read in grey if a sample of them
    #: has no colour.
    grey: bool = False
    #: Turn each class into four by rotating its images. An example is protected
    #: together with its rotations.
    rotations: bool = False
    #: Who owns an example: the name of a column or array, or a regular expression with
    #: one group that is matched to file names.
    owner: Name = None
    #: Table column with the class, or with --target the task. Default: a column whose
    #: values repeat.
    label: Name = None
    #: Table columns with numbers to use as features. Default: all numeric columns that
    #: have no other role.
    features: Names = ()
    #: Table column with numbers to predict. Default: classes are predicted.
    target: Name = None
    #: Data for validation, in a format of SOURCE. Default: a share of its classes.
    validation: File = None
    #: Data for the test. Default: another share of the classes of SOURCE.
    test: File = None
    #: Also write a file for `plan`, with the same data and target.
    plan: File = None
    #: Also write a file for `tune`, with a search around this config.
    tune: File = None
    #: Keep training examples that are in held-out data, too, and choose no stage by
    #: these. Without it, such examples are left out of training.
    keep_duplicates: bool = False

    def _lines(self) -> list[str]:
        files = {"out": self.out, "plan": self.plan, "tune": self.tune}
        for name, path in files.items():
            if path is not None and path.exists():
                raise FileExistsError(f"{path} exists; name another file by --{name}")
        options = {  # 0 and "" are given, too, and refused by name
            name: value
            for name in (*_OF_SOURCE, *_HELD_OUT)
            if not ((value := getattr(self, name)) is None or value is False)
            and value != ()
        }
        how = {"ways": self.ways, "keep_duplicates": self.keep_duplicates}
        source = described_source(self.source, self.out, **how, **options)
        wishes = {field.name: getattr(self, field.name) for field in fields(Wishes)}
        text, said = first_config(source, Wishes(**wishes))
        with waiting("checking it as training would (all data are read)"):
            config = _check(text, self.out.parent)
        written = {self.out: text} | self._beside(config, tomllib.loads(text))
        for path, content in written.items():
            with open(path, "x", encoding="utf-8", opener=owner_only) as file:
                file.write(content)  # it holds private numbers
        rows = {"source": f"{self.source} ({source.layout})"}
        for split, part in source.parts.items():
            units = (f"{name} {number:,}" for name, number in part.num_units.items())
            rows[split] = ", ".join(units)
        if set(source.parts) == {TRAIN}:
            too_few = source.notes.get("held out")
            rows["held out"] = too_few or _nothing_held_out(source.layout)
        for key in ("label", "groups", "features"):
            if key in source.notes:
                names = source.table[key]
                shown = names if isinstance(names, str) else ", ".join(names)
                rows[key] = f"{shown} ({source.notes[key]})"
        next_one = f"{PROGRAM} train {shlex.quote(str(self.out))} --out runs/1"
        last = {
            "written": f"{', '.join(map(str, written))}; read the comments, then",
            "next": next_one,
        }
        return [*facts(rows, 10), *said, *facts(last, 10)]

    def _beside(self, config: TrainingConfig, table: dict[str, Any]) -> dict[Path, str]:
        """The files of `plan` and `tune` for the same data, if they are asked for."""
        base, found = self.out.parent, {}
        if self.plan is not None:
            asked = relocated(plan_around(config, table), base)
            text = to_toml(asked)
            found[self.plan] = (
                f"# For `{PROGRAM} plan {self.plan} --out DIR`.\n\n{text}"
            )
        if self.tune is not None:
            if config.evaluation is None:
                raise ValueError(
                    "--tune needs held-out data, on which runs are compared; give them "
                    "by --validation PATH"
                )
            search = search_around(relocated(table, base))
            note = "runs are compared on held-out data: state true if they are public"
            text = to_toml(search, {"held_out_is_public": note})
            found[self.tune] = (
                f"# For `{PROGRAM} tune {self.tune} --out DIR`.\n\n{text}"
            )
        return found


def _nothing_held_out(layout: str) -> str:
    """What follows if no data are held out, and what would have a part held out."""
    give = (
        "give the classes names (an array 'classes' or 'labels'), or paths of other "
        "data as validation and test under [data], and an [evaluation]"
    )
    if layout == STORED:
        give = "import the data with --validation and --test"
    return (
        "nothing, so nothing is chosen and nothing is scored: the last stage is "
        f"released even if it is worse than the features; {give}"
    )


def _check(text: str, base: Path) -> TrainingConfig:
    """Returns a config that training would take; refuses any other."""
    # Imported here: Flax costs a second, which no help should pay.
    from jaxdp_episodic.trainer.run.assemble import checked_run

    table = {"type": "TrainingConfig", **tomllib.loads(text)}
    try:
        config = TrainingConfig.from_dict(table, where="config")
        checked_run(config, base)
    except USER_ERRORS as error:
        raise ValueError(
            f"nothing is written, as training would refuse it: {error}; change the "
            "data or the options (--population, --relation, --shots, --ways, --unit, "
            "--epsilon)"
        ) from error
    return config
