"""Plans consider correlated noise, and choose it only where it gains."""

import pytest

from jaxdp_episodic.tools.cli.plan import planned
from jaxdp_episodic.tools.plan.question import read_plan
from jaxdp_episodic.trainer.config.training_config import read_config
from jaxdp_episodic.trainer.run.assemble import plan as trainers_plan

FILE = """
version = 1
epsilon = {epsilon}
delta = 1e-5
privacy_unit = "{unit}"
neighboring_relation = "{relation}"
schemes = ["poisson"]
[data]
type = "Glyphs"
small = true
[episode]
ways = 4
shots = 1
examples = [2]
population = 20
[compute]
episodes_per_step = 4
total_episodes = 1_200
fewest_steps = 300
most_steps = 300
[train]
l2_clip_norm = 0.1
{train}
[train.learner]
kind = "protonet"
[train.model]
kind = "conv_embedding"
channels = [4]
embedding = 4
"""


def weighed(tmp_path, *, epsilon=8.0, unit="example", relation="zero_out", train=""):
    """The plan's line about correlated noise, and the config that it writes."""
    path, out = tmp_path / "plan.toml", tmp_path / "out"
    asked = {"epsilon": epsilon, "unit": unit, "relation": relation, "train": train}
    path.write_text(FILE.format(**asked))
    lines = planned(read_plan(path), tmp_path, out)
    (line,) = (line for line in lines if line.startswith("correlated noise: "))
    return line, read_config(out / "recommended.toml")


@pytest.mark.slow
def test_bands_are_written_where_they_gain(tmp_path):
    line, config = weighed(tmp_path)
    assert "groups of 'example' leave 0." in line and "not for you" not in line
    assert (config.noise.groups, config.noise.horizon) == ("example", 30.0)
    assert f": {config.noise.bands} groups" in line
    head = (tmp_path / "out" / "recommended.toml").read_text()
    assert f"# {line}.\n" in head and "its noise multiplier is" in line
    budget = trainers_plan(config, config.data.load("train", None))
    assert budget.step.bands.count == config.noise.bands
    assert budget.spent(300) <= 8.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epsilon": 1.0}, "not for you, at best 2 groups of"),
        ({"train": 'noise = "gaussian"'}, "not weighed, as the file has 'noise'"),
        ({"unit": "class", "relation": "add_remove"}, "not for you, at best"),
    ],
)
def test_a_plan_without_bands_says_why(tmp_path, changes, said):
    line, config = weighed(tmp_path, **changes)
    assert said in line
    assert isinstance(config.noise, str)
