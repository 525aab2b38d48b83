"""Fixed features: independent rows, caches, wavelets."""

import tomllib

import numpy as np
import pytest

from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.trainer.config.training_config import TrainingConfig, read_config
from jaxdp_episodic.trainer.config.training_parts import NUM_WAVELETS, FeaturesConfig
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.learners.features import (
    FixedFeatures,
    compiled_wavelets,
    make_filters,
)
from jaxdp_episodic.trainer.run.assemble import Tables, assembled
from training_runs import TINY


def table(seed=0, num=12):
    rng = np.random.default_rng(seed)
    return ExampleTable.from_records(
        rng.normal(size=(num, 3)), units={"class": np.repeat(np.arange(num // 2), 2)}
    )


def squares(rows):
    return np.square(rows) * 2.0


def test_rows_are_features_of_examples():
    data = table(num=1_200)  # three calls, the last one padded
    made = FixedFeatures(squares, "squares", unit_norm=False).table(data)
    np.testing.assert_allclose(made.features, 2 * data.features**2, rtol=1e-6)
    assert made.population is data.population
    unit = FixedFeatures(squares, "squares").table(data)
    np.testing.assert_allclose(np.linalg.norm(unit.features, axis=1), 1, rtol=1e-6)
    assert unit.fingerprint != made.fingerprint
    zero = FixedFeatures(lambda rows: rows * 0, "zero").table(data)
    assert not zero.features.any()
    tree = Population((np.array([2]), np.array([0, 0])), ("class", "example"))
    nobody = ExampleTable(np.zeros((0, 5), np.float32), None, tree)
    with pytest.raises(ValueError, match="at least one example"):
        FixedFeatures(squares, "squares").table(nobody)
    for fields in ({"function": 3}, {"unit_norm": 1}, {"settings": {"a": object()}}):
        with pytest.raises(TypeError):
            FixedFeatures(**{"function": squares, "name": "a", **fields})


@pytest.mark.parametrize(
    ("function", "error", "complaint"),
    [
        (lambda r: r - r.mean(axis=0), ValueError, "depend only on that example"),
        (lambda r: r[:3], ValueError, "must return an array of shape"),
        (lambda r: np.where(r > 1, np.nan, r), ValueError, "must be finite"),
        (lambda r: r.astype(str), TypeError, "must return numbers"),
        (lambda r: np.zeros((500, 2**16 + 1)), ValueError, "at most 65536"),
    ],
    ids=["coupled", "cut", "nan", "text", "wide"],
)
def test_bad_functions_are_refused(function, error, complaint):
    with pytest.raises(error, match=complaint):
        FixedFeatures(function, "bad").table(table(num=60))


def test_every_example_and_split_has_equally_many_features():
    widths = iter((3, 3, 4))  # two calls for the first batch

    def growing(rows):
        return np.ones((len(rows), next(widths)))

    with pytest.raises(ValueError, match="must be 3 numbers for every example, got 4"):
        FixedFeatures(growing, "growing").table(table(num=600))
    mapping = {"type": "TrainingConfig", **tomllib.loads(TINY)}
    config = TrainingConfig.from_dict(mapping)
    tables = Tables(config, None)
    tables.load("train")
    tables.features = FixedFeatures(lambda r: r.reshape(len(r), -1)[:, :9], "others")
    with pytest.raises(ValueError, match=r"as in training, got those of 'validation'"):
        assembled(config, tables)


def test_features_in_a_config():
    assert FixedFeatures.of(FeaturesConfig()) is None
    wavelets = FixedFeatures.of(FeaturesConfig(kind="wavelets"))
    assert wavelets == FixedFeatures.wavelets()
    made = FixedFeatures.of(FeaturesConfig(kind="scaled", mean=[41, 0], std=[1, 0.5]))
    np.testing.assert_array_equal(made.of_examples(np.ones((3, 2))), [[-40, 2]] * 3)
    with pytest.raises(ValueError, match=r"one number for each feature; an .* \[3\]"):
        made.of_examples(np.ones((3, 3)))
    whole = FeaturesConfig(kind="onnx", path="x", size=[6, 8], std=-0.5)
    assert (whole.size, whole.std, whole.grid) == ((6, 8), (-0.5,) * 3, 1)
    assert FeaturesConfig.from_dict(whole.to_dict()) == whole


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "wavelet"}, "did you mean 'wavelets'"),
        ({"cache": 3}, "cache"),
        ({"kind": "onnx"}, "path must be given with kind='onnx'"),
        ({"kind": "wavelets", "grid": 2}, "grid is for kind='onnx'"),
        ({"kind": "scaled", "std": [1], "mean": [1], "pool": "max"}, "pool is for kin"),
        ({"kind": "scaled", "std": [1, 0], "mean": [1, 1]}, "std must be > 0 and fini"),
        ({"pool": "max", "grid": 65}, "grid must be at most 64"),
        ({"pool": "none", "grid": 2}, "grid is for a pool other than 'none'"),
        ({"size": [8, 8, 8]}, r"size must be one number or \[height, width\]"),
        ({"std": [1, 0, 1]}, "std must not be 0"),
        ({"mean": [1, 2]}, "mean must be one number or 3, one a channel"),
    ],
)
def test_settings_of_a_network(fields, message):
    given = {"kind": "onnx", "path": "x"} if "kind" not in fields else {}
    with pytest.raises((TypeError, ValueError), match=message):
        FeaturesConfig(**given, **fields)


def test_filters_are_gabors():
    """Against the two-dimensional definition in double precision."""
    rows, columns = make_filters(28, 21)
    wavelength = 21 * 2 / 7  # the second scale
    angle, deviation = np.pi * 3 / 8, wavelength / 2
    middle_y, middle_x = 4.5 * 28 / 14 - 0.5, 9.5 * 21 / 14 - 0.5
    y, x = np.arange(28)[:, None] - middle_y, np.arange(21) - middle_x
    phase = 2 * np.pi / wavelength * (np.sin(angle) * y + np.cos(angle) * x)
    gabor = np.exp(-(y**2 + x**2) / (2 * deviation**2) + 1j * phase)
    gabor /= 2 * np.pi * deviation**2
    ours = np.outer(rows.waves[8 + 3, 4], columns.waves[8 + 3, 9])
    np.testing.assert_allclose(ours, gabor, atol=1e-8)


def test_wavelets_of_images():
    rng = np.random.default_rng(0)
    images = rng.random((5, 28, 28, 2), np.float32)
    images[0] = 0.0
    images[1] = 0.5  # no orientation: moduli far below the others
    images[3] = images[2][:, ::-1].copy()
    made = np.asarray(compiled_wavelets((28, 28, 2))(images))
    assert made.shape == (5, 2 * NUM_WAVELETS)
    assert not made[0].any()
    np.testing.assert_allclose(np.linalg.norm(made[1:], axis=1), 1, rtol=1e-5)
    assert np.abs(made[2] - made[3]).max() > 0.01
    # Equal channels give equal features; brightness is divided out.
    swapped = np.asarray(compiled_wavelets((28, 28, 2))(images[..., ::-1]))
    np.testing.assert_allclose(
        swapped[:, :NUM_WAVELETS], made[:, NUM_WAVELETS:], atol=1e-6
    )
    with pytest.raises(ValueError, match="need images"):
        compiled_wavelets((28, 28))
    with pytest.raises(ValueError, match="at least 8 x 8"):
        compiled_wavelets((7, 28, 1))


def test_sizes_that_do_not_fit_are_refused_before_a_cache_is_written(tmp_path):
    text = TINY.replace("population = 20", "population = 21")
    (tmp_path / "tiny.toml").write_text(text + '[features]\nkind = "wavelets"\n')
    tables = Tables(read_config(tmp_path / "tiny.toml"), None, folder=tmp_path / "run")
    with pytest.raises(ValueError, match="population"):
        tables.load("train")
    assert not (tmp_path / "run").exists()
