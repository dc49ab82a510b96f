"""This module holds the verb `export`: a trained model in another tool's format."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.arguments import Adapter, Checkpoint, Json, RunName
from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import exit_codes, show_json
from headrace.core.command import rerun_without
from headrace.core.errors import ConfigError
from headrace.core.folders import is_point, point_of
from headrace.core.loading import loading

if TYPE_CHECKING:
    from headrace.assemble.sockets import Build
    from headrace.compress.spec import QuantizationSpec
    from headrace.export.edge import EdgeExport
    from headrace.export.point import StoredMatrix
    from headrace.model.lora import StorageErrors


def _storage_words(to: str, base: str, errors: "StorageErrors") -> str:
    """Return what storage in few bits costs where adapters are used elsewhere."""
    learned = f"the adapters moved them by {errors.learned:.2%}"
    if to == "peft":
        return (
            f"the adapters learned beside weights in {base}, which are {errors.stored:.2%} off the "
            f"whole ones (of their norm); {learned}. Beside whole weights logits are off by that"
        )
    return (
        f"the adapters are in the weights as they were stored in {base}, and nothing is lost; "
        f"stored in {base} again these would be {errors.requantized:.2%} off (of their norm), and "
        f"{learned}"
    )


def export(
    run: RunName,
    *,
    to: Annotated[
        str,
        typer.Option(
            help="hf: a whole model; vllm: one in few bits, which transformers reads too; peft: "
            "adapters alone; gguf: llama.cpp's file; onnx: ONNX Runtime's; executorch: a program "
            "for devices; torchvision: weights of a network of images."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="A new folder, or file of gguf; RUN/FORMAT without it."),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help="How matrices are stored. gguf: f32, f16, q8_0 or q4_0; onnx: fp32, int8 or int4; "
            "executorch: fp32 or 8da4w; hf, vllm: int8, int8-dynamic or int4."
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    adapter: Adapter = "",
    json: Json = False,
) -> None:
    """Write a run's model in another tool's format; with --adapter, its base with that merged."""
    with exit_codes(json):
        with loading():
            from headrace.cli.companions import note_template
            from headrace.cli.vision import export_images
            from headrace.export.gguf import file_name, stored_as
            from headrace.export.opened import open_exported, origin_of
            from headrace.export.peft import stored_in
            from headrace.export.run import export_run
            from headrace.export.vision import FOLDER
            from headrace.inference.images import images_run
            from headrace.inference.load import read_plan
            from headrace.model.companions import LOST, Companions, read_companions
            from headrace.model.lora import storage_errors
        if to == FOLDER or images_run(run, catalogue()) is not None:
            export_images(run, to, output, quantize, checkpoint, adapter, as_json=json)
            return
        if (writes := _writer_of(run, to, quantize)) is not None:
            writes(run, to, output, quantize, checkpoint, adapter, json)
            return
        stored = stored_as(to, quantize)
        opened = open_exported(run, catalogue(), adapter=adapter, checkpoint=checkpoint)
        build, folder = opened.build, opened.run
        plan = build.plan if is_point(folder) else read_plan(folder, catalogue())
        companions = read_companions(
            folder, plan.model.pretrained, lambda line: print(line, file=sys.stderr)
        )
        talked = note_template(opened.talks, plan)
        if talked is not None:
            companions = (companions or Companions()).with_template(talked.template)
        name = f"{plan.name}-{Path(adapter).name}" if adapter else plan.name
        file = file_name(name, stored) if to == "gguf" else ""
        origin = origin_of(opened, checkpoint, catalogue())
        written = export_run(
            build,
            to,
            output or folder / (f"{to}-{Path(adapter).name}" if adapter else to) / file,
            run=folder,
            sequence_length=plan.data.sequence_length,
            companions=companions or Companions(),
            quantize=stored,
            name=name,
            origin=origin,
            note=lambda line: print(line, file=sys.stderr),
        )
        errors = storage_errors(build.model, build.source)
        if errors is not None:
            print(_storage_words(to, stored_in(build), errors), file=sys.stderr)
        loss_fields = build.prepared.loss_fields
        if json:
            values = {"to": to, "file" if to == "gguf" else "folder": str(written)}
            values |= {"not_kept": [*LOST] if companions is None else []}
            values |= {} if errors is None else {"storage": errors._asdict()}
            values |= {} if talked is None else {"chat_template_sha256": talked.template_sha256}
            show_json({**values, **loss_fields})
        else:
            print(written)
            for loses in loss_fields.values():
                print(f"the tokenizer loses text: {loses}", file=sys.stderr)


def _writer_of(run: Path, to: str, quantize: str | None) -> Callable[..., None] | None:
    """Return what writes a format that is neither whole nor llama.cpp's; None of these."""
    from headrace.export.edge import FORMATS
    from headrace.export.run import VLLM

    if to in FORMATS:
        return _export_for_device
    is_packed = to == "hf" and (quantize is not None or _quantized_point(run) is not None)
    return _export_packed if to == VLLM or is_packed else None


def _export_for_device(
    run: Path,
    to: str,
    output: Path | None,
    quantize: str | None,
    checkpoint: str | None,
    adapter: str,
    json: bool,
) -> None:
    """Write a run's model, or a quantized one, for a runtime of devices; see `export`."""
    from headrace.export.edge import EQUAL

    point = point_of(run)
    if point is not None and not adapter and checkpoint is None:
        export, folder = _of_point(point, to, quantize), point
    else:
        export, folder = _of_run(run, to, quantize, checkpoint, adapter)
    ending = "" if export.spec.name == "fp32" or point is not None else f"-{export.spec.name}"
    named = f"-{Path(adapter).name}" if adapter else ""
    file = export.write(output or folder / f"{to}{named}{ending}", folder)
    if json:
        values: dict[str, Any] = {"to": to, "file": str(file), "preset": export.spec.name}
        values |= {"bytes": export.bytes, "drift": export.drift, "equal": export.equal}
        show_json(values)
        return
    print(file)
    print(
        f"{export.bytes / 1e6:.4g} MB in {export.spec.name}; run by its own runtime, its logits "
        f"differ from those of the {'fake-quantized ' if export.stored else ''}model by at most "
        f"{export.drift:.1e}, and by no more than {EQUAL:g} after {export.equal:.0%} of the tokens",
        file=sys.stderr,
    )


def _quantized_point(run: Path) -> Path | None:
    """Return the folder of the point in few bits that a name is of; None where it is of none."""
    from headrace.export.point import is_pruned_point

    point = point_of(run)
    return None if point is None or is_pruned_point(point) else point


def _codes_of(
    point: Path, quantize: str | None
) -> tuple["Build", "QuantizationSpec", "dict[str, StoredMatrix]"]:
    """Return the model, the spec and the codes of a point, which stay as they are.

    Raises:
        ConfigError: the command asks for another quantization.
    """
    from headrace.export.point import closed_point

    build, spec, stored = closed_point(point, catalogue())
    if quantize not in (None, spec.name):
        raise ConfigError(
            f"--quantize {quantize} is of a run, and {point} is stored in {spec.name} already",
            rerun_without("--quantize", verb="export"),
        )
    return build, spec, stored


def _export_packed(
    run: Path,
    to: str,
    output: Path | None,
    quantize: str | None,
    checkpoint: str | None,
    adapter: str,
    json: bool,
) -> None:
    """Write a folder in few bits that vLLM and transformers read; see `export`."""
    from headrace.cli.companions import note_template
    from headrace.export.compressed_tensors import CHOICES, INSTALL, PackedExport
    from headrace.export.compression import plain_build
    from headrace.export.opened import open_chosen
    from headrace.inference.load import read_plan
    from headrace.model.companions import Companions, read_companions
    from headrace.plan.technique import Stage

    if (point := _quantized_point(run)) is not None:
        build, spec, stored = _codes_of(point, quantize)
        plan, folder, companions = build.plan, point, Companions()
        export = PackedExport(build, spec, stored)
        ending = to
    else:
        opened = open_chosen(run, catalogue(), adapter=adapter, checkpoint=checkpoint)
        folder, plan = opened.run, read_plan(opened.run, catalogue())
        build = plain_build(opened.build, Stage.MATERIALIZE)
        build.model.to("cpu")
        preset = quantize or CHOICES[0]
        export = PackedExport.of_run(build, preset)
        companions = read_companions(
            folder, plan.model.pretrained, lambda line: print(line, file=sys.stderr)
        )
        companions = companions or Companions()
        if (talked := note_template(opened.talks, plan)) is not None:
            companions = companions.with_template(talked.template)
        named = f"-{Path(adapter).name}" if adapter else ""
        ending = f"{to}{named}-{preset}"
    out = output or folder / ending
    drift = export.write(
        out, folder, sequence_length=plan.data.sequence_length, companions=companions
    )
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    if json:
        values = {"to": to, "folder": str(out), "preset": export.spec.name}
        show_json({**values, "bytes": size, "drift": drift})
        return
    print(out)
    distance = f"not compared: {INSTALL}, which opens it"
    if drift is not None:
        distance = f"opened by transformers, logits differ from the model's by at most {drift:.1e}"
    print(f"{size / 1e6:.4g} MB in {export.spec.name}; {distance}", file=sys.stderr)


def _of_point(point: Path, to: str, quantize: str | None) -> "EdgeExport":
    """Return the export of a quantized model, or of a pruned one; see `_codes_of`."""
    from headrace.export.edge import EdgeExport, spec_of
    from headrace.export.point import is_pruned_point, pruned_build

    if is_pruned_point(point):
        build, spec = pruned_build(point, catalogue()), spec_of(to, quantize, None)
        return EdgeExport(build, to, spec, build.plan.data.sequence_length, build.plan.name)
    build, spec, stored = _codes_of(point, quantize)
    context, name = build.plan.data.sequence_length, build.plan.name
    return EdgeExport(build, to, spec, context, name, stored=stored)


def _of_run(
    run: Path, to: str, quantize: str | None, checkpoint: str | None, adapter: str
) -> tuple["EdgeExport", Path]:
    """Return the export of a run's model, and the run's folder; see `export`."""
    from headrace.cli.companions import note_template
    from headrace.export.compression import plain_build
    from headrace.export.edge import EdgeExport, spec_of
    from headrace.export.opened import open_chosen, origin_of
    from headrace.export.point import trained_spec
    from headrace.inference.load import read_plan
    from headrace.plan.technique import Stage

    opened = open_chosen(run, catalogue(), adapter=adapter, checkpoint=checkpoint)
    plan = read_plan(opened.run, catalogue())
    spec = spec_of(to, quantize, trained_spec(plan))
    talked = note_template(opened.talks, plan)
    build = plain_build(opened.build, Stage.MATERIALIZE)
    build.model.to("cpu")
    export = EdgeExport(build, to, spec, plan.data.sequence_length, plan.name)
    export.origin = origin_of(opened, checkpoint, catalogue())
    export.template = "" if talked is None else talked.template
    return export, opened.run
