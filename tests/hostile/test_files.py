"""Untrusted data files: no code runs, no path leads outside."""

import os
import struct
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.tools import cli
from jaxdp_episodic.tools.requests.request import read_population
from jaxdp_episodic.trainer.data.adapters import from_huggingface, from_tfds
from jaxdp_episodic.trainer.data.folders import load_class_folders
from jaxdp_episodic.trainer.data.user_files import load_npz


class Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickles_do_not_run(tmp_path):
    ran = tmp_path / "ran"
    for name in ("features", "labels", "unused"):
        arrays = {"features": np.zeros((1, 2)), "labels": np.zeros(1, int)}
        arrays[name] = np.array([Runs(ran), Runs(ran)], dtype=object)
        path = tmp_path / "x.npz"
        np.savez(path, allow_pickle=True, **arrays)
        with pytest.raises(
            ValueError, match=f"{name}.npy must not contain Python objects"
        ):
            load_npz(path)
        with pytest.raises(ValueError, match="pickles are refused"):
            read_population({"file": "x.npz", "levels": ["labels"]}, tmp_path)
    np.save(tmp_path / "x.npz", np.array([Runs(ran)], dtype=object))
    (tmp_path / "x.npz.npy").rename(tmp_path / "x.npz")
    with pytest.raises(ValueError, match="x.npz must be an npz file"):
        load_npz(tmp_path / "x.npz")
    assert not ran.exists()


HEADER = "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 1), }"


@pytest.mark.parametrize(
    "header",
    [
        HEADER.replace("'<f8'", "[('a', '<f8')]"),
        HEADER.replace("'<f8'", "'<f8,O'"),
        HEADER.replace("'<f8'", "__import__('os')"),
        HEADER.replace("(2, 1)", "(2, -1)"),
        HEADER.replace("(2, 1)", "(2.0, 1)"),
        HEADER.replace("(2, 1)", "(2, True)"),
        HEADER.replace("(2, 1)", "(__import__('os').system('touch ran'), 1)"),
        HEADER.replace("(2, 1)", "(" * 5000),
        HEADER.replace("'shape': (2, 1)", "'descr': '<f8'"),
        "",
    ],
)
def test_headers_are_not_evaluated(tmp_path, monkeypatch, header):
    monkeypatch.chdir(tmp_path)
    data = b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header.encode()
    with zipfile.ZipFile("x.npz", "w") as archive:
        archive.writestr("features.npy", data + bytes(16))
    with pytest.raises(ValueError, match="x.npz must be an npz file: features.npy"):
        load_npz("x.npz")
    assert [file.name for file in tmp_path.iterdir()] == ["x.npz"]


def test_honest_arrays_of_other_orders_and_versions_are_read(tmp_path):
    images = np.asfortranarray(np.arange(24.0).reshape(2, 3, 4).astype(">f4"))
    path = tmp_path / "x.npz"
    for version in ((1, 0), (2, 0), (3, 0)):
        packed = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)
        with packed, packed.open("features.npy", "w") as file:
            np.lib.format.write_array(file, images, version)
        np.testing.assert_array_equal(load_npz(path).features, images.reshape(6, 4))


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "C:x", "..\\x", "a\nb"]
)
def test_names_in_archives_do_not_lead_outside(tmp_path, name):
    path = tmp_path / "in" / "x.npz"
    path.parent.mkdir()
    np.savez(path, features=np.zeros((2, 1)), labels=np.arange(2))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{name}.npy", b"")
    with pytest.raises(ValueError, match="must be an npz file"):
        load_npz(path)
    assert [file.name for file in tmp_path.rglob("*")] == ["in", "x.npz"]


def test_invalid_bytes_are_refused(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, features=np.zeros((2, 1), bool), labels=np.array(["a", "b"]))
    assert path.read_bytes().count(np.lib.format.magic(1, 0)) == 2

    def changed(name, data):
        with zipfile.ZipFile(path) as archive:
            members = {n: archive.read(n) for n in archive.namelist()}
        members[name] = members[name][: -len(data)] + data
        with zipfile.ZipFile(path, "w") as archive:
            for member, inside in members.items():
                archive.writestr(member, inside)

    changed("features.npy", b"\x02\x01")
    with pytest.raises(ValueError, match="booleans other than 0 and 1"):
        load_npz(path)
    changed("features.npy", b"\0\x01")
    for letter in (0x110000, 0xD800, 0xFFFFFFFF):
        changed("labels.npy", struct.pack("<II", letter, 0x61))
        with pytest.raises(ValueError, match="text that is not Unicode"):
            load_npz(path)


def test_other_programs_are_not_asked_to_read_images(tmp_path, monkeypatch):
    """Pillow hands PostScript to Ghostscript, whatever the file is called."""
    (tmp_path / "data" / "a").mkdir(parents=True)
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    picture = tmp_path / "data" / "a" / "x.png"
    Image.new("RGB", (4, 4)).save(picture, "EPS")
    with pytest.raises(ValueError, match="must be a readable image"):
        load_class_folders(tmp_path / "data")
    for kind in ("PPM", "ICO"):
        Image.new("RGB", (4, 4)).save(picture, kind)
        with pytest.raises(ValueError, match="must be a readable image"):
            load_class_folders(tmp_path / "data")
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
        Image.new("RGB", (4, 4)).save(picture, kind)
        assert load_class_folders(tmp_path / "data").num_examples == 1
    assert not (tmp_path / "ran").exists()


def test_undecodable_class_names_are_refused(tmp_path):
    folder = tmp_path / "data" / "a\udcff"
    try:
        folder.mkdir(parents=True)
    except OSError:
        pytest.skip("this file system keeps no such names")
    with pytest.raises(ValueError, match="must have a name in UTF-8"):
        load_class_folders(tmp_path / "data")


@pytest.mark.parametrize("name", ["../secret.csv", "{}/secret.csv", "link.csv"])
def test_a_request_reads_nothing_outside_its_folder(tmp_path, name):
    secret = tmp_path / "secret.csv"
    secret.write_text("password\nhunter2\n")
    inside = tmp_path / "requests"
    inside.mkdir()
    (inside / "link.csv").symlink_to(secret)
    table = {"file": name.format(tmp_path), "levels": ["school"]}
    with pytest.raises(ValueError, match="must lie in the request's folder") as found:
        read_population(table, inside)
    assert "hunter2" not in str(found.value)
    assert "password" not in str(found.value)
    (inside / "own.csv").write_text("school\na\n")
    assert read_population({**table, "file": "own.csv"}, inside).num_units(1) == 1


def test_adapters_refuse_other_types_than_numbers():
    good = {"image": [1.0, 2.0], "label": 1}
    assert from_tfds([good]).num_examples == 1
    for bad in ([1j], ["a"], [None], [[1], [1, 2]], {"a": 1}, 10**400):
        with pytest.raises(TypeError, match="'image' must be numbers"):
            from_tfds([{**good, "image": bad}])
    for wrong, message in (
        ({"image": [1e300, 0.0]}, "finite"),
        ({"label": b"\xff"}, "class ids must be UTF-8"),
    ):
        with pytest.raises(ValueError, match=message):
            from_tfds([good | wrong])
    with pytest.raises(ValueError, match="max_bytes=100"):
        from_tfds(iter(lambda: good, None), max_bytes=100)  # endless
    with pytest.raises(ValueError, match="max_bytes=100"):
        from_huggingface([good] * 100, features="image", label="label", max_bytes=100)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = 1\0", "not valid TOML"),
        (b"a = '\xff'", "not UTF-8 text"),
        (b"a = 1\na = 2", "not valid TOML"),
        (b"a = " + b"9" * 5000, "not valid TOML"),
        (b"[a" + b".a" * 65 + b"]", "a key of more than 64 parts in line 1"),
        (b"\nb = {" + b"'a'. " * 65 + b"a = 1}", "more than 64 parts in line 2"),
        (b"b = {c = 1, " + b"a." * 65 + b"a = 1}", "more than 64 parts in line 1"),
        (b"\na = [" + b"[" * 5000, "not valid TOML: nested too deeply"),
    ],
)
def test_hostile_toml_is_refused(tmp_path, content, message):
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_toml(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", {}),
        (b"\xef\xbb\xbfa = 1\r\n", {"a": 1}),
        (b"a = '" + b"[" * 999 + b"'", {"a": "[" * 999}),
        (b'a = """' + b'\\"[{' * 99 + b'"""', {"a": '"[{' * 99}),
        (b"# " + b"a." * 99 + b"\na = 1", {"a": 1}),
        (b"a = [" + b"[1.5, 2.5],\n" * 99 + b"]", {"a": [[1.5, 2.5]] * 99}),
        (b"[a" + b".a" * 3 + b"]", {"a": {"a": {"a": {"a": {}}}}}),
    ],
)
def test_toml_that_only_looks_nested_is_read(tmp_path, content, expected):
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    assert read_toml(path) == expected


@pytest.fixture
def pipe(tmp_path):
    """A pipe whose reader would wait for a second if it were not refused."""
    opened = []

    def release():
        while opened:
            os.close(opened.pop())

    def made(name):
        os.mkfifo(tmp_path / name)
        opened.append(os.open(tmp_path / name, os.O_RDWR | os.O_NONBLOCK))
        return tmp_path / name

    timer = threading.Timer(1.0, release)
    timer.start()
    yield made
    timer.cancel()
    timer.join()
    release()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no such pipes")
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["epsilon"], "x.toml"),
        (["explore", "--no-browser"], "x.toml"),
        (["train", "--out", "{}/out"], "x.toml"),
        (["epsilon", "--ledger"], "run.sqlite"),
        (["epsilon", "--out", "{}/out.csv", "--batch"], "x.jsonl"),
    ],
)
def test_pipes_are_refused(tmp_path, pipe, capsys, arguments, name):
    words = [word.format(tmp_path) for word in arguments]
    for path in (pipe(name), Path("/dev/zero")):
        if path.suffix or "--batch" not in words:
            assert cli.run([*words, str(path)]) == 2
            assert "must be a plain file" in capsys.readouterr().err


def test_sizes_in_a_pipe_are_refused(tmp_path, pipe):
    table = {"file": pipe("units.csv").name, "levels": ["unit"]}
    with pytest.raises(ValueError, match="must be a plain file"):
        read_population(table, tmp_path)
