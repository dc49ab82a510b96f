"""Draw labelled images, and keep them beside shards of their labels.

An image is a row of one token: its label. So the labels of a side are one document of a shard set,
whose tokens are the classes themselves, and everything that works on shards works on images too:
order, ranks, resume, fingerprints. A row's image is read by the place of its label. The tokenizer
is one of bytes without merges; a label is one byte, so bits per byte are bits per label.

The images are the ten digits in a font of 5 x 7 dots, each turned, sheared, scaled, moved and
colored by a draw of its own, in noise. Nothing is downloaded, and the same numbers are drawn
everywhere. The file's sha256 stands in the manifest of its labels, and is compared at every start.

Shapes: N images, C colors, H x W pixels.
"""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.files import sha256_of, shell
from headrace.core.vision_config import COLORS, VisionConfig
from headrace.data.rows import Row
from headrace.data.shards import Shards, ShardWriter, sync_file
from headrace.data.tokenizer import train_tokenizer

FILE = "images.bin"
"""Name of the images of a side, beside its labels: the bytes of uint8 [N, C, H, W]."""
IMAGE = "image"
"""Name of an image among what a row carries beside its tokens."""
SOURCE = "digits, sha256 "
"""Beginning of the source of a shard set of labels; the digest of the images follows."""
FONT = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
"""The digits in dots, row by row from the top."""
ROTATION, SHEAR, MOVE = 0.2, 0.2, 0.08
"""Most radians, most shear, and most of the image's width by which a digit is changed."""
HEIGHTS = (0.65, 0.85)
"""Least and most height of a digit, as shares of the image's."""
CONTRAST = 0.5
"""Least difference of the digit's brightness from the ground's, of the range of a color."""
AT_ONCE = 256
"""Images that are drawn together."""


def draw(config: VisionConfig, seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [N, C, H, W] and their labels int64 [N].

    Args:
        config: their size, classes and noise.
        seed: of all draws; two sides have different ones.
        count: N.
    """
    images = np.empty((count, COLORS, config.size, config.size), np.uint8)
    labels = np.empty(count, np.int64)
    for begin in range(0, count, AT_ONCE):  # so that fewer images are the first of more
        random = np.random.Generator(np.random.PCG64([seed, begin]))
        part = (random.random(AT_ONCE) * config.classes).astype(np.int64)
        left = min(AT_ONCE, count - begin)
        labels[begin : begin + left] = part[:left]
        images[begin : begin + left] = _drawn(random, part, config)[:left]
    return images, labels


def _drawn(random: np.random.Generator, labels: np.ndarray, config: VisionConfig) -> np.ndarray:
    """Return the images of some labels."""
    count, size = len(labels), config.size
    least, most = HEIGHTS
    height = size * (least + (most - least) * random.random((count, 1, 1)))
    rotation = ROTATION * (2 * random.random((count, 1, 1)) - 1)
    shear = SHEAR * (2 * random.random((count, 1, 1)) - 1)
    across, down = MOVE * size * (2 * random.random((2, count, 1, 1)) - 1)
    places = np.arange(size) + 0.5 - size / 2
    x, y = places[None, None, :] - across, places[None, :, None] - down
    x, y = np.cos(rotation) * x + np.sin(rotation) * y, np.cos(rotation) * y - np.sin(rotation) * x
    dot = height / 7  # pixels of a dot of the font
    ink = _sampled(labels, (x + shear * y) / dot + 2.5, y / dot + 3.5)
    ground = random.random((count, COLORS, 1, 1))
    pen = random.random((count, COLORS, 1, 1))
    apart = (pen - ground).mean(1, keepdims=True)
    pen = pen + np.where(apart < 0, -1, 1) * np.maximum(0, CONTRAST - np.abs(apart))
    image = ground + (pen - ground) * ink[:, None]
    noise = random.random((3, count, COLORS, size, size)).sum(0) - 1.5  # deviation of a half
    return (255 * np.clip(image + 2 * config.noise * noise, 0, 1)).astype(np.uint8)


def _sampled(labels: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return how much ink there is at places of the font's dots, between 0 and 1."""
    dots = np.zeros((len(FONT), 9, 7))  # with an empty dot around each digit
    for digit, rows in enumerate(FONT):
        dots[digit, 1:-1, 1:-1] = [[int(dot) for dot in row] for row in rows.split()]
    x, y = np.clip(x + 0.5, 0, 5.999), np.clip(y + 0.5, 0, 7.999)
    left, top = x.astype(np.int64), y.astype(np.int64)
    x, y, digit = x - left, y - top, labels[:, None, None]
    upper = dots[digit, top, left] * (1 - x) + dots[digit, top, left + 1] * x
    lower = dots[digit, top + 1, left] * (1 - x) + dots[digit, top + 1, left + 1] * x
    return upper * (1 - y) + lower * y


def images_key(config: VisionConfig) -> str:
    """Return 12 hex digits that change with anything that the images depend on."""
    names = ("source", "classes", "size", "images", "validation_images", "noise")
    facts = [1, *(getattr(config, name) for name in names)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def write_images(config: VisionConfig, folder: Path) -> None:
    """Draw both sides into an empty folder, as the shards of a text stand in one."""
    tokenizer = train_tokenizer([], vocab=257, trainer="counts")  # bytes without merges
    tokenizer.save(folder / "tokenizer.json")
    with (folder / "tokenizer.json").open("rb") as file:
        sync_file(file)
    sides = (("train-00", 0, config.images), ("validation", 1, config.validation_images))
    for name, seed, count in sides:
        (folder / name).mkdir()
        images, labels = draw(config, seed, count)
        path = folder / name / FILE
        with path.open("wb") as file:
            file.write(images.data)
            sync_file(file)
        writer = ShardWriter(
            folder / name,
            tokenizer.vocab,
            document_token=tokenizer.document_token,
            tokenizer=tokenizer.fingerprint,
            source=f"{SOURCE}{sha256_of(path)}",
            rebuild=f"rm -r {shell(folder)}",
        )
        writer.add(labels, text_bytes=count)
        writer.close()


class Images:
    """The images of one side, which are read by the places of their labels.

    Raises:
        ConfigError: they are not those that the labels were written with.
    """

    def __init__(self, shards: Shards) -> None:
        path, source = shards.directory / FILE, shards.source
        wanted = source.removeprefix(SOURCE)
        digest = sha256_of(path) if path.is_file() else "none"
        if not source.startswith(SOURCE) or digest != wanted:
            raise ConfigError(
                f"{path} is damaged: its sha256 is {digest[:12]}, and its labels are those of "
                f"{wanted[:12]}",
                f"rm -r {shell(shards.directory.parent)}",  # the same command draws it again
            )
        pixels = np.memmap(path, np.uint8, "r")
        size = math.isqrt(pixels.size // COLORS // (shards.tokens - 1))
        self.images = pixels.reshape(-1, COLORS, size, size)

    def beside(self, source: int, unit: int, row: Row) -> Row:
        """Return a row of training with its image; the loader calls it on any thread."""
        return row._replace(numbers={**(row.numbers or {}), IMAGE: self.images[unit][None]})

    def of_row(self, number: int | None, row: Row) -> Row:
        """Return a row of validation with its image; a row of padding has a black one."""
        image = np.zeros_like(self.images[0]) if number is None else self.images[number]
        return row._replace(numbers={**(row.numbers or {}), IMAGE: image[None]})


OfRow = Callable[[int | None, Row], Row]
"""(number of a row of validation, None for padding; the row) -> the row with what is beside it."""
