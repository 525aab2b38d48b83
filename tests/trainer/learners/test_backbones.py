"""ONNX networks as fixed features: values against NumPy, and refusals."""

import hashlib
import tomllib

import numpy as np
import pytest

from jaxdp_episodic.files import onnx_file
from jaxdp_episodic.files.onnx_file import read_onnx
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.config.training_parts import FeaturesConfig
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.learners.features import FixedFeatures, network_features
from jaxdp_episodic.trainer.run.assemble import Tables
from training_runs import TINY

REASON = "the extra [onnx] is not installed"
onnx = pytest.importorskip("onnx", reason=REASON)
pytest.importorskip("onnxruntime", reason=REASON)
helper, numpy_helper = onnx.helper, onnx.numpy_helper
node = onnx.helper.make_node
FLOAT = onnx.TensorProto.FLOAT
RNG = np.random.default_rng(0)
WEIGHTS = RNG.normal(size=(5, 3, 1, 1)).astype(np.float32)
IMAGES = RNG.random((6, 8, 10, 3)).astype(np.float32)


def saved(path, nodes, shape=("n", 3, None, None), weights=WEIGHTS, **changes):
    """Writes an ONNX file of nodes from "x" to "y"; returns its path."""
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", changes.pop("kind", FLOAT), shape)],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(weights, "w"), *changes.pop("more", [])],
    )
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def convolution(path, **changes):
    """Convolution 1 x 1 ("z"), then a rectifier ("y")."""
    nodes = [node("Conv", ["x", "w"], ["z"]), node("Relu", ["z"], ["y"])]
    return saved(path, nodes, **changes)


def features(path, images=IMAGES, **settings):
    config = FeaturesConfig(kind="onnx", path=str(path), **settings)
    return network_features(config)[0](images)


def table_of(path):
    table = ExampleTable.from_records(IMAGES, units={"class": np.arange(6) // 2})
    return FixedFeatures.onnx(path).table(table)


def by_numpy(images, mean=0.0, std=1.0):
    """The convolution of images by NumPy, (n, H, W, 5)."""
    return ((images - np.float32(mean)) / np.float32(std)) @ WEIGHTS[:, :, 0, 0].T


def check(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_pools_against_numpy(tmp_path):
    path = convolution(tmp_path / "a.onnx")
    z = by_numpy(IMAGES)
    y = np.maximum(z, 0)
    check(features(path), y.mean((1, 2)))
    check(features(path, output="z", pool="max"), z.max((1, 2)))
    check(features(path, pool="none"), y.transpose(0, 3, 1, 2).reshape(6, -1))
    blocks = y.reshape(6, 2, 4, 2, 5, 5).mean((2, 4)).reshape(6, -1)
    check(features(path, grid=2), blocks)


def test_images_are_converted_to_the_networks_input(tmp_path):
    path, grey = convolution(tmp_path / "a.onnx"), IMAGES[..., :1]
    flat, scale = (
        np.full_like(IMAGES, 0.3),
        {"mean": (0.5, 0.4, 0.3), "std": (0.2, -0.1, 1.0)},
    )
    for images, settings, wanted in (
        (IMAGES, scale, by_numpy(IMAGES, **scale)),
        (IMAGES, {"channels": "bgr"}, by_numpy(IMAGES[..., ::-1])),
        (grey, {}, by_numpy(grey.repeat(3, 3))),
        (flat, {"size": (5, 7)}, by_numpy(flat)),
    ):
        check(features(path, images, output="z", **settings), wanted.mean((1, 2)))
    one = WEIGHTS[:, :1]
    path = convolution(tmp_path / "b.onnx", shape=(1, 1, 8, 10), weights=one)
    luma = IMAGES @ np.float32([0.299, 0.587, 0.114])
    wanted = luma.mean((1, 2))[:, None] * one[:, 0, 0, 0]
    check(features(path, output="z", channels="grey"), wanted)


def test_other_networks_against_numpy(tmp_path):
    """Channels last, the size stated in a file, tokens, vectors, and subgraphs."""
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]),
        node("Conv", ["t", "w"], ["z"]),
        node("Transpose", ["z"], ["y"], perm=[0, 2, 3, 1]),
    ]
    path, small = saved(tmp_path / "a", nodes, shape=(1, 4, 5, 3)), IMAGES[:, ::2, ::2]
    assert features(path, channels_last=True, pool="none").shape == (6, 4 * 5 * 5)
    check(features(path, small, channels_last=True), by_numpy(small).mean((1, 2)))
    nodes = [
        node("Conv", ["x", "w"], ["z"]),
        node("Reshape", ["z", "shape"], ["t"]),
        node("Transpose", ["t"], ["y"], perm=[0, 2, 1]),
        node("ReduceMean", ["y"], ["v"], axes=[1], keepdims=0),
    ]
    shape = numpy_helper.from_array(np.array([1, 5, 80]), "shape")
    path, wanted = saved(tmp_path / "b", nodes, more=[shape]), by_numpy(IMAGES)
    for settings in ({}, {"output": "v"}):
        check(features(path, **settings), wanted.mean((1, 2)))
    inner = helper.make_tensor_value_info("inner", FLOAT, None)
    branch = helper.make_graph(
        [node("Conv", ["x", "w"], ["inner"])], "branch", [], [inner]
    )
    nodes = [node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)]
    yes = numpy_helper.from_array(np.array(True), "yes")
    check(features(saved(tmp_path / "c", nodes, more=[yes])), wanted.mean((1, 2)))


def test_networks_that_mix_images_are_refused(tmp_path):
    """A network that subtracts the mean of its batch."""
    nodes = [
        node("Conv", ["x", "w"], ["z"]),
        node("ReduceMean", ["z"], ["m"], axes=[0]),
        node("Sub", ["z", "m"], ["y"]),
    ]
    path = saved(tmp_path / "a.onnx", nodes)
    assert not features(path).any()
    path = convolution(tmp_path / "b.onnx")
    together = features(path)
    alone = np.concatenate([features(path, IMAGES[i : i + 1]) for i in range(6)])
    np.testing.assert_array_equal(alone, together)
    unit = together / np.linalg.norm(together, axis=1, keepdims=True)
    np.testing.assert_allclose(table_of(path).features, unit, rtol=1e-6)
    nodes = [node("RandomNormalLike", ["x"], ["r"]), node("Add", ["x", "r"], ["y"])]
    with pytest.raises(ValueError, match="must depend only on that"):
        table_of(saved(path, nodes))


def outside(tensor):
    """Marks a tensor as stored in another file."""
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "/etc/passwd"


@pytest.mark.parametrize("place", ["initializer", "attribute", "branch"])
def test_weights_in_other_files_are_refused(place, tmp_path):
    path = convolution(tmp_path / "a.onnx")
    model = onnx.load_model_from_string(path.read_bytes())
    constant = node(
        "Constant", [], ["c"], value=numpy_helper.from_array(WEIGHTS, "hidden")
    )
    if place == "initializer":
        outside(model.graph.initializer[0])
    else:
        outside(constant.attribute[0].t)
        graph = helper.make_graph([constant], "g", [], [])
        branch = node("If", ["c"], ["y2"], then_branch=graph)
        model.graph.node.append(branch if place == "branch" else constant)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="must contain its weights"):
        read_onnx(path)


def test_invalid_network_files_are_refused(tmp_path, monkeypatch):
    for name, content in (("a", b"no network"), ("b", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="must be an ONNX file"):
            read_onnx(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_onnx(tmp_path / "none")
    with pytest.raises(ValueError, match="must be a plain file"):
        read_onnx(tmp_path)
    path = convolution(tmp_path / "c")
    for name in ("q", "x"):
        with pytest.raises(ValueError, match=r"output must be a value .* \['z', 'y'\]"):
            read_onnx(path, name)
    monkeypatch.setattr(onnx_file, "_MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(ValueError, match="must have at most"):
        read_onnx(path)


def test_every_cut_and_many_changes_of_a_file_end_in_an_error_or_features(tmp_path):
    """Damaged files must not crash the process."""
    whole = convolution(tmp_path / "whole").read_bytes()
    path, rng = tmp_path / "a.onnx", np.random.default_rng(0)
    damaged = [whole[:n] for n in range(0, len(whole), 7)]
    for _ in range(60):
        content = bytearray(whole)
        content[rng.integers(len(content))] = rng.integers(256)
        damaged.append(bytes(content))
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            FixedFeatures.onnx(path)
        except ValueError:
            refused += 1
    assert refused > len(damaged) // 3


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"shape": ("n", 4, None, None)}, {}, "3 channels, but input 'x' .* takes 4"),
        ({"shape": (8, 3, None, None)}, {}, "must take one image, takes 8"),
        ({"shape": (1, 3, 8, 9)}, {"size": 8}, r"size must be that of input 'x'"),
        ({}, {"grid": 9}, r"grid must be at most the positions .* \(8, 10\), got 9"),
        ({"weights": np.ones((5, 4, 1, 1), np.float32)}, {}, "cannot be run"),
    ],
)
def test_unsuitable_settings_are_refused(changes, settings, message, tmp_path):
    path = convolution(tmp_path / "a.onnx", **changes)
    with pytest.raises(ValueError, match=message):
        features(path, **settings)


def test_inputs_other_than_images_are_refused(tmp_path):
    """So are outputs that are not finite."""
    path = tmp_path / "a.onnx"
    nodes = [node("Relu", ["x"], ["y"])]
    for changes in ({"shape": ("n", 3, None)}, {"kind": onnx.TensorProto.DOUBLE}):
        saved(path, nodes, **changes)
        with pytest.raises(ValueError, match="must be float32 images of 4 axes"):
            features(path)
    with pytest.raises(ValueError, match="features 'onnx' must be finite"):
        table_of(convolution(path, weights=WEIGHTS * np.nan))
    convolution(path)
    for images in (IMAGES[..., 0], (IMAGES * 255).astype(np.uint8)):
        with pytest.raises(ValueError, match="need images"):
            features(path, images)
    with pytest.raises(ValueError, match="1 or 3 channels, got 2"):
        features(path, IMAGES[..., :2])


def test_a_run_resumes_with_the_same_network_only(tmp_path):
    path = convolution(tmp_path / "a.onnx")
    text = (
        TINY + '[features]\nkind = "onnx"\npath = "a.onnx"\ncache = "cache"\ngrid = 2'
    )
    config = {**tomllib.loads(text), "type": "TrainingConfig"}
    tables = Tables(TrainingConfig.from_dict(config), tmp_path)
    assert tables.features is not None
    described = tables.features.described()
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert described["settings"]["sha256"] == sha256
    assert described["settings"]["grid"] == 2
    assert str(tmp_path) not in str(described)
    convolution(path, weights=WEIGHTS * 2)
    again = FixedFeatures.onnx(path, grid=2)
    assert again.described() != described
    assert FixedFeatures.onnx(path, grid=2, std=0.5).described() != again.described()
