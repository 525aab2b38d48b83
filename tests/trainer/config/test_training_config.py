"""Training configs: shipped ones are valid, and errors name the mistake."""

import dataclasses
import tomllib
from pathlib import Path

import numpy as np
import pytest

from image_files import image_folders
from jaxdp_episodic.accountant.describe.population import PersonBounds, Population
from jaxdp_episodic.trainer.config.training_config import TrainingConfig, read_config
from jaxdp_episodic.trainer.config.training_parts import OptimizerConfig
from jaxdp_episodic.trainer.run.assemble import Tables, assembled
from rows import fast_and_slow
from training_runs import TINY

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted(
    path
    for path in (ROOT / "configs").glob("*.toml")
    if "[learner]" in path.read_text(encoding="utf-8")
)

PEOPLE = """
[people]
classes = 3
examples = 1
[step]
privacy_unit = "person"
[step.sampling]
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY, encoding="utf-8")
    return path


def changed(path, old, new):
    text = TINY.replace(old, new)
    assert text != TINY
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_valid_and_name_their_command(path):
    config = read_config(path)
    assert TrainingConfig.from_dict(config.to_dict()) == config
    assert config.start is None or config.start.shape == config.step.shape == ()
    assert f"jaxdp-episodic train configs/{path.name} --out" in path.read_text()


# Data sets of images: their folders, classes and images of each class; then a class's
# folder, an image's name and shape, and how many images a class has here.
IMAGES = {
    "Omniglot": (
        *(("omniglot/images_background", "omniglot/images_evaluation"), 964, 20),
        *("Greek/character{:02d}", "0001_{:02d}.png", (105, 105), 20),
    ),
    "MiniImageNet": (
        *([f"mini_imagenet/{split}" for split in ("train", "val", "test")], 64, 600),
        *("n{:08d}", "{}.jpg", (84, 84, 3), 17),
    ),
}
OF_IMAGES = [p.stem for p in CONFIGS if type(read_config(p).data).__name__ in IMAGES]


@pytest.mark.filterwarnings("ignore:.*people in common")
@pytest.mark.parametrize(
    "stem", fast_and_slow(OF_IMAGES, lambda stem: stem == "train_omniglot_people")
)
def test_configs_of_images_are_planned_and_draw_from_their_folders(stem, tmp_path):
    """Of six classes, in the layout of the data set."""
    assert len(OF_IMAGES) == 5
    text = (ROOT / "configs" / f"{stem}.toml").read_text(encoding="utf-8")
    kind = tomllib.loads(text)["data"]["type"]
    folders, classes, slots, one, name, shape, number = IMAGES[kind]
    for place, folder in enumerate(folders):
        names = map(one.format, range(6 * place, 6 * place + 6))
        counts = dict.fromkeys(names, number)
        image_folders(tmp_path / "data" / folder, counts, shape, place, name)
    (tmp_path / "configs").mkdir()
    path = tmp_path / "configs" / "run.toml"
    if "zero_out" in text:  # published slots, which are public; here they are full
        public = f"num_classes = {classes}\n", f"population = {slots} }}"
        assert all(stated in text for stated in public)
        text = text.replace(public[0], "num_classes = 6\n")
        text = text.replace(public[1], f"population = {number} }}")
    path.write_text(text)
    config = read_config(path)
    run, evaluations, _ = assembled(config, Tables(config, path.parent))
    assert run.data.num_examples == 6 * number
    assert 7.9 < run.budget.spent(run.budget.num_steps) <= 8
    assert tuple(evaluations) == config.evaluation.splits
    draws = map(run.draw_blocks, [len(run.budget.before) + 1] * 99)
    filled = next(block for (block, *_) in draws if block.slot_mask.any())
    assert np.isfinite(filled.inputs).all()


def test_defaults(tiny):
    config = read_config(tiny)
    assert config.optimizer == OptimizerConfig()
    assert config.seed is None
    tree = Population.from_sizes([20] * 40)
    step = config.step.step(tree)
    assert step.population is None  # the population is public
    assert step.clip_unit == "episode" and step.privacy_unit == "example"
    config = read_config(changed(tiny, ", population = 20", ""))
    assert config.step.step(tree).population is tree


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("epsilon = 8.0", "epsilom = 8.0", "unknown key 'epsilom'; did you mean"),
        ("num_steps = 3", "", "exactly one of num_steps .* got neither"),
        ("[step.", "[step]\nnoise_multiplier = 2.0\n[step.", "num_steps .* got both"),
        ("[step.", "[step]\nprivacy_unit = 'x'\n[step.", "step: privacy_unit must be"),
        ("l2_clip_norm = 0.1", "l2_clip_norm = 0.0", "l2_clip_norm must be a number"),
        ('type = "Glyphs"', 'type = "Glyph"', "did you mean 'Glyphs'"),
        ("shots = 1", 'shots = 1\nloss = "squared_error"', "with kind='protonet'"),
        ("ways = 4", "ways = 41", "ways must be at most num_classes"),
        ("ways = 4", "ways = [4, 5]", "step: sampling must be of one setting"),
        ("version = 1", "version = 2", "version must be 1"),
        ("[learner]", "[learner", "not valid TOML.*line"),
        ('splits = ["validation"]', 'splits = "validation"', "splits must be a list"),
        ("epsilon = 8.0", "epsilon = [1.0, 2.0]", "epsilon must be one number"),
        ("num_steps = 3", "num_steps = 3\nnormalizer = 1e30", "normalizer must be a"),
        (
            'kind = "protonet"',
            'kind = "maml"',
            "model.kind must be one of .*'conv_classifier'.*got 'conv_embedding'",
        ),
        ("[model]", "[people]\nclasses = 3\n[model]", "people is for .*'person', got"),
        ("[model]", "[people]\ntruncate = true\n[model]", "give at least one of"),
        ('kind = "protonet"\n', "", "missing key 'kind', .*one of .*'protonet'"),
        ('kind = "conv_embedding"\n', "", "missing .*'kind', .*'conv_embedding'"),
        ("[step.sampling]", PEOPLE, "data.owner must be given .* 'Glyphs' without"),
    ],
)
def test_mistakes_are_named(tiny, old, new, message):
    with pytest.raises((TypeError, ValueError), match=message):
        read_config(changed(tiny, old, new))


def test_bounds_of_people_truncate_training_data_only(tiny):
    text = TINY.replace("small = true", 'small = true\nowner = "typeface"')
    tiny.write_text(text.replace("[step.sampling]", PEOPLE), encoding="utf-8")
    config = read_config(tiny)
    assert TrainingConfig.from_dict(config.to_dict()) == config
    tables = Tables(config, None)
    train, held_out = tables.load("train"), tables.load("validation")
    assert train.people is not None and train.people.most_classes == 3
    assert held_out.people is not None and held_out.people.most_classes == 8
    assert tables.truncation is not None and tables.truncation.examples_dropped > 0
    assert tables.truncation.bounds == PersonBounds(classes=3, examples=1)
    strict = dataclasses.replace(config.people, truncate=False)
    with pytest.raises(ValueError, match="people must be within the bounds"):
        dataclasses.replace(config, people=strict).training_data()


def test_only_prototypes_are_evaluated_with_other_ways():
    mapping = {"type": "TrainingConfig", **tomllib.loads(TINY)}
    mapping["evaluation"]["ways"] = 7
    config = TrainingConfig.from_dict(mapping)
    assert config.evaluation is not None and config.evaluation.ways == 7
    mapping["learner"]["kind"] = "maml"
    with pytest.raises(ValueError, match="ways must not be given with learner.kind"):
        TrainingConfig.from_dict(mapping)


def test_not_tables_and_not_text(tmp_path):
    for name in TrainingConfig.nested_specs:
        mapping = {"type": "TrainingConfig", **tomllib.loads(TINY), name: []}
        with pytest.raises(TypeError, match=f"{name} must be a table of keys"):
            TrainingConfig.from_dict(mapping)
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_config(path)
    with pytest.raises(FileNotFoundError):
        read_config(tmp_path / "none.toml")
