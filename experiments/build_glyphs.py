r"""Builds the embedded Hangul glyph set from free fonts; only needed to change it.

A class is one of the 2,350 syllables of KS X 1001, an example a typeface. The fonts
come from Debian packages under the SIL Open Font License (OFL-1.1), whose rendered
shapes may be used freely; the copyright file of every package is checked for it.

Needs a Debian system with ``apt-get`` and ``dpkg``, and Pillow and fontTools::

    python experiments/build_glyphs.py --work build/glyphs \
        --out jaxdp_episodic/trainer/data

Writes ``glyphs.npz`` (28 x 28, 1 bit a pixel), ``glyphs_small.npz`` (64 classes at
14 x 14, for tests) and ``glyphs.toml`` (which typefaces of which package versions, and
hashes of the arrays).
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

EXAMPLES, SIZE, INNER = 20, 28, 24
LEAST_DISTANCE = 0.25  # to every kept rendering, in units of the mean ink
RENDERED_AT = 120
INK = 112  # of 255: what counts as ink after shrinking
SMALL_CLASSES = 64

PACKAGES = (
    "fonts-woowa-bm",
    "fonts-nanum",
    "fonts-nanum-extra",
    "fonts-seto",
    "fonts-lxgw-wenkai",
    "fonts-ukij-uyghur",
    "fonts-naver-d2coding",
    "fonts-noto-cjk",
    "fonts-noto-cjk-extra",
)
# File names, and after a colon the place within the file. Most different first: a class
# keeps the first 20 of them that differ enough.
FACES = """
BMDOHYEON_ttf.ttf BMEULJIROTTF.ttf BMHANNAAir_ttf.ttf BMJUA_ttf.ttf
BMKIRANGHAERANG-TTF.ttf BMYEONSUNG_ttf.ttf BMHANNAPro.ttf NanumBrush.ttf NanumPen.ttf
NanumBarunpenR.ttf NanumMyeongjo.ttf NanumGothic.ttf NanumSquareRoundR.ttf setofont.ttf
LXGWWenKai-Regular.ttf UKIJCJK.ttf NotoSerifCJK-Regular.ttc:1
D2Coding-Ver1.3.2-20180524-all.ttc NotoSansCJK-Regular.ttc:1 NanumSquareR.ttf
NanumBarunGothic.ttf NanumMyeongjoExtraBold.ttf NanumGothicExtraBold.ttf
NanumSquareRoundEB.ttf NanumBarunpenB.ttf NotoSerifCJK-Black.ttc:1
NotoSansCJK-Black.ttc:1 NanumSquareEB.ttf BMHANNA_11yrs_ttf.ttf
BMEuljiro10yearslater.ttf NanumBarunGothicUltraLight.ttf NotoSansCJK-Thin.ttc:1
NotoSerifCJK-ExtraLight.ttc:1 LXGWWenKai-Bold.ttf NanumSquareL.ttf NanumGothicLight.ttf
NanumBarunGothicBold.ttf NotoSerifCJK-Bold.ttc:1 D2Coding-Ver1.3.2-20180524-all.ttc:1
BMEuljirooraeorae.ttf NotoSansCJK-Light.ttc:1
""".split()


class Face(NamedTuple):
    """One typeface."""

    name: str
    package: str
    font: Any
    characters: frozenset[int]


def syllables() -> list[str]:
    """Returns the 2,350 Hangul syllables of KS X 1001, in its order."""
    rows, cells = range(0xB0, 0xC9), range(0xA1, 0xFF)
    return [bytes([r, c]).decode("euc-kr") for r in rows for c in cells]


def fetch(work: Path) -> dict[str, str]:
    """Downloads and unpacks the packages; returns package -> version."""
    versions = {}
    for package in PACKAGES:
        folder = work / package
        if not list(work.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=work, check=True)
        (archive,) = work.glob(f"{package}_*.deb")
        subprocess.run(["dpkg", "-x", archive, folder], check=True)
        (terms,) = folder.glob("usr/share/doc/*/copyright")
        text = terms.read_text(encoding="utf-8")
        if "OFL-1.1" not in text and "SIL-1.1" not in text:
            raise ValueError(f"{package} is not under the SIL Open Font License")
        versions[package] = archive.name.split("_")[1].replace("%3a", ":")
    return versions


def faces(work: Path) -> Iterator[Face]:
    """Yields the typefaces in the order of `FACES`."""
    from fontTools.ttLib import TTFont  # pyright: ignore[reportMissingImports]
    from PIL import ImageFont

    for face in FACES:
        name, _, number = face.partition(":")
        place = int(number or 0)
        (path,) = [p for package in PACKAGES for p in (work / package).rglob(name)]
        font = TTFont(path, fontNumber=place, lazy=True)
        yield Face(
            str(font["name"].getDebugName(4)),
            path.relative_to(work).parts[0],
            ImageFont.truetype(str(path), RENDERED_AT, index=place),
            frozenset(font.getBestCmap() or ()),
        )


def render(font: Any, character: str) -> np.ndarray | None:
    """Returns the character cropped, fitted into 24 x 24, centred, as (28, 28) bool."""
    from PIL import Image, ImageDraw

    canvas = Image.new("L", (3 * RENDERED_AT, 3 * RENDERED_AT))
    ImageDraw.Draw(canvas).text((RENDERED_AT, RENDERED_AT), character, 255, font=font)
    box = canvas.getbbox()
    if box is None:
        return None
    cut = canvas.crop(box)
    scale = INNER / max(cut.size)
    size = (max(1, round(cut.width * scale)), max(1, round(cut.height * scale)))
    cut = cut.resize(size, Image.Resampling.BOX)
    image = Image.new("L", (SIZE, SIZE))
    image.paste(cut, ((SIZE - size[0]) // 2, (SIZE - size[1]) // 2))
    return np.asarray(image) >= INK


def distinct(character: str, available: list[Face]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first 20 renderings that differ enough, and their typefaces."""
    kept: list[np.ndarray] = []
    origin: list[int] = []
    for place, face in enumerate(available):
        if ord(character) not in face.characters:
            continue
        image = render(face.font, character)
        if image is None or not image.any():
            continue
        apart = [
            np.sum(image != other) / (0.5 * (image.sum() + other.sum()))
            for other in kept
        ]
        if min(apart, default=1.0) >= LEAST_DISTANCE:
            kept.append(image)
            origin.append(place)
        if len(kept) == EXAMPLES:
            return np.stack(kept), np.array(origin, np.uint8)
    raise ValueError(f"{character} has only {len(kept)} renderings that differ enough")


def smaller(images: np.ndarray) -> np.ndarray:
    """Halves both sides of binary images (..., 28, 28)."""
    shape = (*images.shape[:-2], SIZE // 2, 2, SIZE // 2, 2)
    return images.reshape(shape).mean(axis=(-3, -1)) >= 0.5


def save(path: Path, images: np.ndarray, names: list[str], origin: np.ndarray) -> str:
    """Writes one set; returns the hash of its arrays."""
    arrays: dict[str, Any] = {
        "bits": np.packbits(images.reshape(*images.shape[:2], -1), axis=-1),
        "side": np.array(images.shape[-1], np.int64),
        "syllables": np.array(names),
        "typefaces": origin,
    }
    np.savez_compressed(path, allow_pickle=False, **arrays)
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def main() -> None:
    """Builds everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("build/glyphs"))
    parser.add_argument("--out", type=Path, default=Path("jaxdp_episodic/trainer/data"))
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    versions = fetch(work)
    available = list(faces(work))
    names = syllables()
    pairs = []
    for number, name in enumerate(names, start=1):
        pairs.append(distinct(name, available))
        if number % 235 == 0:
            print(f"{number:,} of {len(names):,} syllables", flush=True)
    images = np.stack([image for image, _ in pairs])
    origin = np.stack([place for _, place in pairs])
    whole = save(options.out / "glyphs.npz", images, names, origin)
    chosen = slice(0, len(names), len(names) // SMALL_CLASSES)
    few = [names[chosen][i] for i in range(SMALL_CLASSES)]
    small = save(
        options.out / "glyphs_small.npz",
        smaller(images[chosen][:SMALL_CLASSES]),
        few,
        origin[chosen][:SMALL_CLASSES],
    )
    lines = [
        "# Where the shapes in glyphs.npz and glyphs_small.npz come from. Made by",
        "# experiments/build_glyphs.py. The fonts are under the SIL Open Font License,",
        "# version 1.1 (https://openfontlicense.org); no font software is included.",
        "",
        f'sha256 = "{whole}"',
        f'sha256_small = "{small}"',
        "",
        "[packages]",
        *(f'{package} = "{version}"' for package, version in versions.items()),
        "",
    ]
    for face in available:
        lines += ["[[typefaces]]", f'name = "{face.name}"']
        lines += [f'package = "{face.package}"', ""]
    (options.out / "glyphs.toml").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
