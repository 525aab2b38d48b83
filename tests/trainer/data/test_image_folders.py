"""Folders in the layouts of Omniglot and mini-ImageNet, and the configs for them."""

import importlib.util
import json
import subprocess
import sys

import pytest

from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from pages import ROOT

PATH = ROOT / "experiments" / "image_folders.py"
TINY = {
    "omniglot": ({"images_background": 40, "images_evaluation": 7}, 8),
    "mini-imagenet": ({"train": 6, "val": 5, "test": 5}, 18),
}


def script():
    spec = importlib.util.spec_from_file_location("image_folders", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TINY)
def test_generated_folders_are_what_the_configs_read(name, tmp_path):
    made = script()
    counts, examples = TINY[name]
    made.generate(name, tmp_path, counts, examples)
    number = next(iter(counts.values()))
    for pipeline in made.PIPELINES:
        table = made.config_on(name, pipeline, tmp_path)
        assert table["step"]["sampling"]["num_classes"] == number
        config = TrainingConfig.from_dict({"type": "TrainingConfig", **table})
        sizes = {"train": (number, examples)}
        sizes["test"] = (list(counts.values())[-1], examples)
        for split, (classes, each) in sizes.items():
            data = config.data.load(split, None)
            assert data.population.children_counts[-1].tolist() == [each] * classes
            channels = 1 if name == "omniglot" else 3
            assert data.features.shape[1:] == (config.data.size,) * 2 + (channels,)
            assert 0 <= data.features.min() < data.features.max() <= 1


def test_the_budget_is_that_of_public_slots():
    made = script()
    for name in TINY:
        for pipeline in made.PIPELINES:
            stem = made.PIPELINES[pipeline].format(name.replace("-", "_"))
            table = made.read_toml(ROOT / "configs" / f"{stem}.toml")
            config = TrainingConfig.from_dict({"type": "TrainingConfig", **table})
            assert config.step.neighboring_relation == "zero_out"
            (folder, *_), slots = made.LAYOUT[name]
            assert config.step.sampling.num_classes == made.LAYOUT[name][0][folder]
            assert config.step.sampling.examples.population == slots


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_one_command_trains_both_pipelines(name, tmp_path):
    made = script()
    counts, _ = TINY[name]  # slots are full: an episode with an empty one is nothing
    made.generate(name, tmp_path / "data", counts, made.LAYOUT[name][1])
    command = [sys.executable, str(PATH), name, str(tmp_path / "data")]
    options = ["--out", str(tmp_path / "out"), "--num-steps", "2"]
    options += ["--episodes", "4"]
    done = subprocess.run(command + options, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results) == ["P3", "MAML"]
    for found in results.values():
        assert 0 <= found["scores"]["test"] <= 1 and 7.9 < found["epsilon"] <= 8
    assert "peak memory" in done.stdout


def test_a_folder_without_classes_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folders of classes"):
        script().config_on("omniglot", "P3", tmp_path)
