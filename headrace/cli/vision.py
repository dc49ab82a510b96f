"""This module holds what verbs do with a network that tells images apart."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import note, show_json, started_as
from headrace.core.command import rerun_with, rerun_without
from headrace.core.errors import ConfigError, UnsupportedError, nearest
from headrace.core.files import shell
from headrace.core.progress import Progress
from headrace.core.units import format_bytes, format_count

if TYPE_CHECKING:
    from headrace.export.vision import ImagesExport


def export_images(
    run: Path,
    to: str,
    output: Path | None,
    quantize: str | None,
    checkpoint: str | None,
    adapter: str,
    *,
    as_json: bool,
) -> None:
    """Write the network of a run of images for a device, or as a folder of weights.

    Raises:
        ConfigError: an option is of text, or the format is none.
        UnsupportedError: the run is of text, or the format is.
    """
    from headrace.export.opened import open_chosen, origin_of
    from headrace.export.vision import (
        FOLDER,
        FORMATS,
        ImagesExport,
        preset_of,
        write_torchvision,
    )
    from headrace.inference.images import images_run
    from headrace.inference.load import read_plan, resolve_run

    if (folder := images_run(run, catalogue())) is None:
        raise UnsupportedError(
            f"--to {to} is a folder of a network of images, and {resolve_run(run)} is of text",
            rerun_with("--to", "hf", verb="export"),
        )
    if to not in (FOLDER, *FORMATS):
        near = nearest(to, (FOLDER, *FORMATS))
        raise UnsupportedError(
            f"--to {to} is a format of text, and {folder} tells images apart",
            rerun_with("--to", near if near in FORMATS else FOLDER, verb="export"),
        )
    if adapter:
        raise ConfigError(
            f"--adapter {adapter} is of a model of text, and {folder} tells images apart",
            rerun_without("--adapter", verb="export"),
        )
    if to == FOLDER and quantize is not None:
        raise ConfigError(
            f"--quantize {quantize} is of a file for a device, and {FOLDER} keeps weights whole",
            rerun_without("--quantize", verb="export"),
        )
    opened = open_chosen(run, catalogue(), checkpoint=checkpoint, images=True)
    if to == FOLDER:
        written = write_torchvision(opened.build, output or folder / FOLDER)
        if as_json:
            show_json({"to": to, "folder": str(written)})
        else:
            print(written)
        return
    plan = read_plan(folder, catalogue())
    preset = preset_of(quantize, bool(opened.build.fake_quantized))
    export = ImagesExport(
        opened.build, to, preset, plan.name, origin_of(opened, checkpoint, catalogue())
    )
    ending = "" if preset == "fp32" else f"-{preset}"
    file = export.write(output or folder / f"{to}{ending}")
    _show_written(export, file, as_json=as_json)


def _show_written(export: "ImagesExport", file: Path, *, as_json: bool) -> None:
    """Print the file of a network, and how far its logits are."""
    from headrace.export.vision import EQUAL

    if as_json:
        values: dict[str, Any] = {"to": export.to, "file": str(file), "preset": export.preset}
        values |= {"bytes": export.bytes, "drift": export.drift}
        show_json({**values, "computed": export.computed, "equal": export.equal})
        return
    print(file)
    print(
        f"{export.bytes / 1e6:.4g} MB in {export.preset}; run by its own runtime, its logits "
        f"differ from those of the network that was evaluated by at most {export.drift:.1e}",
        file=sys.stderr,
    )
    if export.computed is not None:
        print(
            "what convolutions read and give has 8 bits in this file; with the same codes computed "
            f"by torch, logits differ by at most {export.computed:.1e}, and by no more than "
            f"{EQUAL:g} of {export.equal:.0%} of the images",
            file=sys.stderr,
        )


def run_images(file: Path, record: Mapping[str, Any], prompt: str, *, as_json: bool) -> None:
    """Run a file on held-out images, and tell how many it tells rightly and how fast it is.

    Raises:
        ConfigError: a prompt is given.
        UnsupportedError: the runtime cannot load the file, or is not installed.
    """
    from headrace.export.measured import GrownMemory
    from headrace.export.vision import ImagesRuntime

    if prompt:
        raise ConfigError(
            f"--prompt is of a model of text, and {file} tells images apart",
            rerun_without("--prompt", verb="run"),
        )
    memory = GrownMemory()
    runtime = ImagesRuntime(file, record)
    accuracy, images = runtime.accuracy(runtime.config.validation_images)
    image_s, peak = runtime.image_s(), memory.read()
    if as_json:
        values = {"runtime": runtime.name, "accuracy": accuracy, "images": images}
        values |= {"image_s": image_s, "bytes": file.stat().st_size, "peak_bytes": peak}
        show_json(values)
        return
    print(f"{accuracy:.2%} of {images:,} held-out images are told rightly")
    more = "" if peak is None else f", in {format_bytes(peak)} of memory"
    print(f"{runtime.name}: {1e3 * image_s:.2f} ms an image{more}", file=sys.stderr)


def prune_images(
    run: Path,
    share: float,
    output: Path | None,
    checkpoint: str | None,
    tokens: int | None,
    progress: Progress,
    *,
    as_json: bool,
) -> None:
    """Leave out the hidden channels of a network of images that count least."""
    from headrace.assemble.vision import ACCURACY
    from headrace.export.vision_pruned import prune_network
    from headrace.inference.load import open_model
    from headrace.train.evaluate import evaluate

    build = open_model(run, catalogue(), checkpoint=checkpoint, with_data=True, images=True)
    out = output or run / "pruned"
    pruning = prune_network(
        build, share, out, accuracy=lambda one: evaluate(one).more[ACCURACY], tokens=tokens
    )
    if as_json:
        show_json({"folder": str(out), **pruning.to_dict(), "told": progress.notes})
        return
    note(
        f"{format_count(pruning.left)} of {format_count(pruning.parameters)} weights are left, "
        f"{pruning.left_flops / pruning.flops:.0%} of the work of an image, and it tells "
        f"{pruning.left_accuracy:.1%} of the held-out images rightly ({pruning.accuracy:.1%} "
        "before) until it is trained on"
    )
    channels = str([*pruning.channels]).replace(" ", "")
    note(f"weights: {out}")
    words = f"vision.pretrained={shell(out)} 'vision.channels={channels}'"
    note(f"next:    {started_as()} train PLAN {words} --with distillation")
