"""Renders the embedded glyph set: Hangul syllables (classes) in 20 typefaces each.

Made once; the result, ``jaxdp_episodic/data/glyphs.npz``, is part of the package. To
make it again, on Debian 12 with ``apt-get`` (no root needed), Pillow and fontTools:

    python experiments/build_glyphs.py --fonts results/fonts --out results/glyphs

Classes are the 2,350 syllables of KS X 1001. Faces are tried in the order of `FACES`,
every family once before a second weight of any. A rendering is kept if it differs
clearly from those kept before, until a class has 20. Only fonts under the SIL Open
Font License 1.1 are used, and each package's copyright file is checked for it.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
from pathlib import Path

import numpy as np

EXAMPLES_A_CLASS = 20
SIDE, FIT = 28, 24  # pixels: of the image, and of the square a glyph is fitted into
RENDER_SIZE = 96  # points, before shrinking
MIN_DISTANCE = 0.25  # L1 distance over mean ink
THRESHOLD = 100  # of 255: what is ink after shrinking
SMALL_CLASSES, SMALL_SIDE = 64, 14  # the cut for tests

PACKAGES = (
    "fonts-lxgw-wenkai",
    "fonts-nanum",
    "fonts-nanum-extra",
    "fonts-naver-d2coding",
    "fonts-noto-cjk",
    "fonts-noto-cjk-extra",
    "fonts-seto",
    "fonts-woowa-bm",
)
# What every package's copyright file must call the licence of its ``Files: *``.
LICENSES = ("OFL-1.1", "SIL-1.1")

# (file, index in a collection): every family once, then other weights of them.
FACES = (
    ("NanumGothic.ttf", 0),
    ("NanumMyeongjo.ttf", 0),
    ("NanumPen.ttf", 0),
    ("NanumBrush.ttf", 0),
    ("NanumBarunpenR.ttf", 0),
    ("BMDOHYEON_ttf.ttf", 0),
    ("BMEULJIROTTF.ttf", 0),
    ("BMEuljiro10yearslater.ttf", 0),
    ("BMHANNAAir_ttf.ttf", 0),
    ("BMHANNAPro.ttf", 0),
    ("BMHANNA_11yrs_ttf.ttf", 0),
    ("BMJUA_ttf.ttf", 0),
    ("BMKIRANGHAERANG-TTF.ttf", 0),
    ("BMYEONSUNG_ttf.ttf", 0),
    ("LXGWWenKai-Regular.ttf", 0),
    ("setofont.ttf", 0),
    ("NotoSerifCJK-Regular.ttc", 1),
    ("NotoSansCJK-Regular.ttc", 1),
    ("D2Coding-Ver1.3.2-20180524-all.ttc", 0),
    ("NanumGothicCoding.ttf", 0),
    ("NanumBarunGothic.ttf", 0),
    ("NanumSquareR.ttf", 0),
    ("NanumSquareRoundR.ttf", 0),
    ("NanumSquare_acR.ttf", 0),
    ("NanumMyeongjo-YetHangul.ttf", 0),
    ("NanumMyeongjoExtraBold.ttf", 0),
    ("NanumGothicExtraBold.ttf", 0),
    ("NanumBarunGothicUltraLight.ttf", 0),
    ("NanumSquareRoundEB.ttf", 0),
    ("NanumSquareEB.ttf", 0),
    ("NanumSquareL.ttf", 0),
    ("NanumSquareRoundL.ttf", 0),
    ("LXGWWenKai-Bold.ttf", 0),
    ("LXGWWenKai-Light.ttf", 0),
    ("NotoSansCJK-Bold.ttc", 1),
    ("NotoSerifCJK-Bold.ttc", 1),
    ("NanumBarunpenB.ttf", 0),
    ("NanumGothicLight.ttf", 0),
    ("NanumBarunGothicLight.ttf", 0),
    ("NanumBarunGothicBold.ttf", 0),
    ("NanumGothicBold.ttf", 0),
    ("NanumMyeongjoBold.ttf", 0),
    ("NanumSquareB.ttf", 0),
    ("NanumGothicCodingBold.ttf", 0),
    ("D2Coding-Ver1.3.2-20180524-all.ttc", 1),
    ("NotoSansCJK-Black.ttc", 1),
    ("NotoSerifCJK-Black.ttc", 1),
    ("NotoSansCJK-Thin.ttc", 1),
    ("NotoSerifCJK-ExtraLight.ttc", 1),
    ("NanumMyeongjoEcoR.ttf", 0),
    ("NanumGothicEcoR.ttf", 0),
)


def ks_x_1001_syllables() -> list[str]:
    """The 2,350 Hangul syllables of KS X 1001, in its order."""
    rows, columns = range(0xB0, 0xC9), range(0xA1, 0xFF)
    return [bytes([row, col]).decode("euc-kr") for row in rows for col in columns]


def fetch(folder: Path) -> dict[str, str]:
    """Downloads and unpacks the packages; returns their versions.

    Raises:
      RuntimeError: a package whose copyright file names another licence.
    """
    folder.mkdir(parents=True, exist_ok=True)
    versions = {}
    for package in PACKAGES:
        if not list(folder.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
        (deb,) = folder.glob(f"{package}_*.deb")
        target = folder / "unpacked" / package
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg", "-x", str(deb), str(target)], check=True)
        text = (target / "usr/share/doc" / package / "copyright").read_text("utf-8")
        license_ = license_of_all_files(text)
        if license_ not in LICENSES:
            raise RuntimeError(f"{package}: its fonts are under {license_!r}")
        shown = subprocess.run(
            ["dpkg-deb", "--field", str(deb), "Version"],
            capture_output=True,
            text=True,
            check=True,
        )
        versions[package] = shown.stdout.strip()
    return versions


def license_of_all_files(text: str) -> str:
    """The licence that a Debian copyright file gives for ``Files: *``."""
    for paragraph in re.split(r"\n\s*\n", text):
        if re.search(r"^Files: \*$", paragraph, re.MULTILINE):
            found = re.search(r"^License: (.*)$", paragraph, re.MULTILINE)
            return found.group(1).strip() if found else ""
    return ""


class Face:
    """One typeface: renders syllables it has."""

    def __init__(self, path: Path, index: int) -> None:
        # Only this script needs them; the package itself reads the result.
        from fontTools.ttLib import TTFont  # pyright: ignore[reportMissingImports]
        from PIL import ImageFont  # pyright: ignore[reportMissingImports]

        table = TTFont(path, fontNumber=index, lazy=True)
        self.name = f"{table['name'].getDebugName(1)}"
        style = table["name"].getDebugName(2)
        if style != "Regular":
            self.name += f" {style}" if not self.name.endswith(str(style)) else ""
        self.characters = set(table.getBestCmap() or ())
        self.font = ImageFont.truetype(str(path), RENDER_SIZE, index=index)

    def render(self, syllable: str) -> np.ndarray | None:
        """(SIDE, SIDE) bool, True is ink; None where the face has no such glyph."""
        from PIL import Image, ImageDraw  # pyright: ignore[reportMissingImports]

        if ord(syllable) not in self.characters:
            return None
        canvas = Image.new("L", (3 * RENDER_SIZE, 3 * RENDER_SIZE))
        draw = ImageDraw.Draw(canvas)
        draw.text((RENDER_SIZE, RENDER_SIZE), syllable, fill=255, font=self.font)
        box = canvas.getbbox()
        if box is None:
            return None
        glyph = canvas.crop(box)
        scale = FIT / max(glyph.size)
        width, height = (max(1, round(length * scale)) for length in glyph.size)
        small = glyph.resize((width, height), Image.Resampling.BOX)
        image = Image.new("L", (SIDE, SIDE))
        image.paste(small, ((SIDE - width) // 2, (SIDE - height) // 2))
        return np.asarray(image) >= THRESHOLD


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """Pixels that differ, over the mean number of ink pixels."""
    ink = (first.sum() + second.sum()) / 2
    return float((first ^ second).sum() / max(ink, 1))


def build(faces: list[Face]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Renders every class.

    Returns:
      images (C, 20, SIDE, SIDE) bool, in the order of the faces; which faces each class
      has, (faces, C) bool; and the syllables.

    Raises:
      RuntimeError: a class with fewer than 20 different renderings.
    """
    syllables = ks_x_1001_syllables()
    images = np.zeros((len(syllables), EXAMPLES_A_CLASS, SIDE, SIDE), bool)
    drawn = np.zeros((len(faces), len(syllables)), bool)
    for place, syllable in enumerate(syllables):
        kept: list[np.ndarray] = []
        for number, face in enumerate(faces):
            image = face.render(syllable)
            if image is None or not image.any():
                continue
            if any(distance(image, other) < MIN_DISTANCE for other in kept):
                continue
            drawn[number, place] = True
            kept.append(image)
            if len(kept) == EXAMPLES_A_CLASS:
                break
        if len(kept) < EXAMPLES_A_CLASS:
            raise RuntimeError(f"{syllable}: only {len(kept)} different renderings")
        images[place] = kept
    return images, drawn, syllables


def write_glyphs(
    path: Path,
    images: np.ndarray,
    drawn: np.ndarray,
    syllables: list[str],
    typefaces: list[str],
) -> str:
    """Writes the set as `load_glyphs` reads it; returns the SHA-256 of its bits.

    Face by face, which compresses better by a fifth, and without the empty margin.
    """
    margin = (SIDE - FIT) // 2
    inner = images[..., margin:-margin, margin:-margin]
    if inner.sum() != images.sum():
        raise RuntimeError("ink in the margin")
    place = np.cumsum(drawn, axis=0) - 1  # of a face among those of a class
    face, class_ = np.nonzero(drawn)
    rows = inner[class_, place[face, class_]]
    bits = np.packbits(rows.reshape(len(rows), -1), axis=-1)
    np.savez_compressed(
        path,
        bits=bits,
        drawn=drawn,
        syllables=np.array(syllables),
        typefaces=np.array(typefaces),
    )
    return hashlib.sha256(bits.tobytes()).hexdigest()


def write_small(path: Path, images: np.ndarray, syllables: list[str]) -> None:
    """Writes the cut for tests, in the layout that `load_npz` reads."""
    shape = (SMALL_CLASSES, EXAMPLES_A_CLASS, SMALL_SIDE, 2, SMALL_SIDE, 2)
    chosen = np.linspace(0, len(images) - 1, SMALL_CLASSES).astype(int)
    pooled = images[chosen].reshape(shape).mean(axis=(3, 5))
    classes = np.array(syllables)[chosen]
    np.savez_compressed(path, images=pooled >= 0.5, classes=classes)


def main() -> None:
    """Writes glyphs.npz, the cut for tests, and which typeface came from where."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fonts", type=Path, default=Path("results/fonts"))
    parser.add_argument("--out", type=Path, default=Path("results/glyphs"))
    options = parser.parse_args()
    versions = fetch(options.fonts)
    faces, packages = [], []
    for file, index in FACES:
        (path,) = (options.fonts / "unpacked").rglob(file)
        faces.append(Face(path, index))
        packages.append(path.relative_to(options.fonts / "unpacked").parts[0])
    images, drawn, syllables = build(faces)

    used = np.flatnonzero(drawn.any(axis=1))
    names = [faces[i].name for i in used]
    options.out.mkdir(parents=True, exist_ok=True)
    digest = write_glyphs(
        options.out / "glyphs.npz", images, drawn[used], syllables, names
    )
    write_small(options.out / "glyphs_small.npz", images, syllables)
    lines = [f"bits: SHA-256 {digest}", "", "| typeface | package | renderings |"]
    lines.append("|---|---|---|")
    for i in used:
        package = f"{packages[i]} {versions[packages[i]]}"
        lines.append(f"| {faces[i].name} | {package} | {drawn[i].sum():,} |")
    (options.out / "typefaces.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
