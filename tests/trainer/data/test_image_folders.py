"""Folders in the layouts of Omniglot and mini-ImageNet, and the configs for them."""

import numpy as np
import pytest
from PIL import Image

from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from pages import ROOT

# Of each config: folders and classes, examples of a class, slots, classes as shipped.
TINY = {
    "omniglot": ({"images_background": 40, "images_evaluation": 7}, 8, 20, 964),
    "mini_imagenet": ({"train": 6, "val": 5, "test": 5}, 18, 600, 64),
}
CONFIGS = [f"{name}{kind}" for name in TINY for kind in ("", "_maml")]


def generate(name, folder, counts, examples):
    """Images that mean nothing in the layout of a data set."""
    rng = np.random.default_rng(0)
    places = [(part, i) for part, number in counts.items() for i in range(number)]
    for number, (part, i) in enumerate(places):
        place = folder / part / f"n{i:08d}"
        if name == "omniglot":
            place = folder / part / f"Alphabet_{i // 33}" / f"character{i % 33:02d}"
        place.mkdir(parents=True)
        for example in range(examples):
            if name == "omniglot":
                pixels = rng.integers(0, 2, (105, 105)).astype(bool)
                file = place / f"{number:04d}_{example + 1:02d}.png"
            else:
                pixels = rng.integers(0, 256, (84, 84, 3)).astype(np.uint8)
                file = place / f"{place.name}{example:08d}.jpg"
            Image.fromarray(pixels).save(file)


@pytest.mark.few(1)
@pytest.mark.parametrize("stem", CONFIGS)
def test_generated_folders_are_what_the_configs_read(stem, tmp_path):
    name = stem.removesuffix("_maml")
    counts, examples, slots, classes = TINY[name]
    generate(name, tmp_path, counts, examples)
    table = {"type": "TrainingConfig", **read_toml(ROOT / f"configs/train_{stem}.toml")}
    config = TrainingConfig.from_dict(table)
    sampling = config.step.sampling
    assert config.step.neighboring_relation == "zero_out"  # of public slots
    assert (sampling.num_classes, sampling.examples.population) == (classes, slots)
    parts = list(counts)
    if name == "omniglot":
        table["data"] |= {"path": str(tmp_path / parts[0])}
        table["data"] |= {"test": str(tmp_path / parts[1])}
    else:
        table["data"]["path"] = str(tmp_path)
    config = TrainingConfig.from_dict(table)
    for split, part in (("train", parts[0]), ("test", parts[-1])):
        data = config.data.load(split, None)
        sizes = data.population.children_counts[-1].tolist()
        assert sizes == [examples] * counts[part]
        channels = 1 if name == "omniglot" else 3
        assert data.features.shape[1:] == (config.data.size,) * 2 + (channels,)
        assert 0 <= data.features.min() < data.features.max() <= 1
