"""The embedded glyphs: what they are, where they come from, how they are split."""

import hashlib
import tomllib
from pathlib import Path

import numpy as np
import pytest

import jaxdp_episodic.trainer.data.built_in as glyphs
from jaxdp_episodic.trainer.data.built_in import load_glyphs

FOLDER = Path(glyphs.__file__).parent
SIZES = {"train": 1_800, "validation": 200, "test": 350}
TEST_CLASSES = "cfe10d085c527eb7"


@pytest.mark.slow
def test_the_split_is_fixed_and_disjoint():
    classes = {split: load_glyphs(split).unit_column("class") for split in SIZES}
    for split, size in SIZES.items():
        names, counts = np.unique(classes[split], return_counts=True)
        assert len(names) == size and np.all(counts == 20)
    everything = np.concatenate([np.unique(c) for c in classes.values()])
    assert len(np.unique(everything)) == 2_350
    # A change here would move test classes into training.
    digest = hashlib.sha256("".join(np.unique(classes["test"])).encode()).hexdigest()
    assert digest[:16] == TEST_CLASSES


def test_features():
    table = load_glyphs("validation")
    assert table.features.shape == (4_000, 28, 28, 1)
    assert set(np.unique(table.features)) == {0.0, 1.0}
    assert 0.1 < table.features.mean() < 0.4  # ink
    half = load_glyphs("validation", size=14)
    expected = table.features.reshape(4_000, 14, 2, 14, 2).mean(axis=(2, 4))
    np.testing.assert_array_equal(half.features[..., 0], expected)


def test_the_small_set_is_a_cut():
    table = load_glyphs("train", size=14, small=True)
    assert table.features.shape == (800, 14, 14, 1)
    names = [
        np.unique(load_glyphs(s, size=14, small=True).unit_column("class"))
        for s in SIZES
    ]
    assert [len(n) for n in names] == [40, 8, 16]
    assert len(np.unique(np.concatenate(names))) == 64
    assert (FOLDER / "glyphs_small.npz").stat().st_size < 25_000


def test_provenance_is_beside_the_data():
    record = tomllib.loads((FOLDER / "glyphs.toml").read_text(encoding="utf-8"))
    assert record["packages"] and len(record["typefaces"]) >= 20
    for face in record["typefaces"]:
        assert face["package"] in record["packages"]
    assert "SIL Open Font License" in (FOLDER / "glyphs.toml").read_text()
    for name, key in (("glyphs", "sha256"), ("glyphs_small", "sha256_small")):
        digest = hashlib.sha256()
        with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as stored:
            for member in stored.files:
                array = np.ascontiguousarray(stored[member])
                digest.update(member.encode() + array.tobytes())
        assert digest.hexdigest() == record[key]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "dev"}, "split must be one of"),
        ({"size": 20}, "size must be 14 or 28, got 20"),
        ({"size": 28, "small": True}, "size must be 14 with small=True"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_glyphs(**arguments)
