"""This module holds the verb `doctor`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.arguments import DeviceName, Json, With, Without
from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import exit_codes, show_json, show_table
from headrace.core.command import rerun
from headrace.core.errors import ConfigError
from headrace.core.files import shell
from headrace.core.loading import loading

if TYPE_CHECKING:
    from headrace.doctor.advice import Advice

EXPORTED = (".gguf", ".onnx", ".pte")
"""How the names of files end that `headrace export` writes for a runtime."""


def doctor(
    what: Annotated[
        list[Path],
        typer.Argument(
            help="A run: runs/NAME, or its NAME; a plan that was not run; what headrace.watch "
            "saved; torch.profiler traces, one of each rank; what another trainer printed; or an "
            "exported file. After a plan key=value, as in batch.tokens=16384.",
            metavar="RUN|PLAN|WATCHED|TRACE...|LOG|FILE",
        ),
    ],
    *,
    with_: With = None,
    without: Without = None,
    device_name: DeviceName = "",
    json: Json = False,
) -> None:
    """Print the findings of a run, the gravest first, and what each remedy would gain."""
    with exit_codes(json):
        with loading():
            from headrace.doctor.trace.facts import HEAD, kernel_lines
            from headrace.doctor.words.answer import findings_json, render_advice
        if what[0].suffix in EXPORTED:
            _decode(what[0], json)
            return
        advice, folder = advice_on(what, with_ or (), without or (), device_name)
        if json:
            show_json(findings_json(advice))
            return
        print(render_advice(advice))
        if folder is not None and (kernels := kernel_lines(folder)):
            show_table(HEAD, kernels)


def advice_on(
    what: Sequence[Path],
    with_: Sequence[str] = (),
    without: Sequence[str] = (),
    device_name: str = "",
) -> tuple["Advice", Path | None]:
    """Return the doctor's answer on what a user named, and the folder where that is a run.

    Args:
        what: a run; a plan, and words `key=value`; what `headrace.watch` saved; traces; or a log.
        with_: names of techniques that a plan gets.
        without: names of techniques that a plan loses.
        device_name: a GPU that is not here, where a plan is named; "" for this machine's device.

    Raises:
        ConfigError: it is none of these.
        RunError: a file of it is damaged.
    """
    with loading():
        from headrace.cli.plans import named_plan, place, rates_here
        from headrace.doctor.advice import advise, advise_loop, advise_plan
        from headrace.doctor.log import is_log
        from headrace.doctor.run import TRACES
    first = what[0]
    if _is_plan(first):
        words = [str(word) for word in what[1:]]
        wanted = named_plan(str(first), words, [*with_], [*without], verb="doctor")
        return advise_plan(wanted, *place(wanted, device_name), catalogue()), None
    if with_ or without:
        raise ConfigError(
            f"--with and --without change a plan, and {first} is none",
            rerun((first, _plan_of(first)), verb="doctor"),
        )
    if len(what) > 1 or (first.name.endswith(TRACES) and not first.is_dir()):
        return advise_loop(what, catalogue()), None
    if first.is_file() and is_log(first):
        return advise_loop(what, catalogue()), None
    folder = _judged_run(first)
    return advise(folder, catalogue(), partial(rates_here, sure=True)), folder


def _decode(file: Path, json: bool) -> None:
    """Decode with an exported file, and print what binds it; see `doctor`."""
    from headrace.export.decoding import examine_file
    from headrace.export.edge_runtime import images_record
    from headrace.export.vision_times import examine_images

    record = images_record(file)
    decoding = examine_file(file) if record is None else examine_images(file, record)
    if json:
        show_json([decoding.to_dict()])
        return
    print(decoding.sentence)
    print(f"  {decoding.evidence}")
    print(f"  try: {decoding.remedy}")


def _judged_run(what: Path) -> Path:
    """Return the folder of the run that is to be judged.

    Raises:
        ConfigError: there is no such run. Where traces may have been meant, the remedy names them.
    """
    from headrace.doctor.run import TRACES
    from headrace.inference.load import resolve_run

    try:
        return resolve_run(what)
    except ConfigError as error:
        ending = next((e for e in TRACES if any(what.glob(f"*{e}"))), "")
        if what.is_file() and not what.stat().st_size:
            raise ConfigError(f"{what} is empty", error.remedy) from None
        if what.is_file() and (what.parent / "plan.toml").is_file():
            message = f"{what} is a file of a run, and a run is judged by its folder"
            raise ConfigError(message, rerun((what, what.parent), verb="doctor")) from None
        if what.is_file():  # gzip is recognised by its content
            named = f"{what}{TRACES[0]}"
            command = rerun((what, named), verb="doctor")
            remedy = f"mv {shell(what)} {shell(named)}, if it is one; {command}"
        elif ending:
            remedy = f"headrace doctor {shell(what)}/*{ending}"
        else:
            raise
        message = f"{error.message}; the name of a trace ends with {' or '.join(TRACES)}"
        raise ConfigError(message, remedy) from None


def _plan_of(what: Path) -> Path:
    """Return the plan file of a run, or the recipe `demo` where the run has none."""
    plan_files = (folder / "plan.toml" for folder in (what, Path("runs") / what))
    return next((file for file in plan_files if file.is_file()), Path("demo"))


def _is_plan(what: Path) -> bool:
    """Return whether this names a TOML file, or a recipe, and no run has the same name."""
    from headrace.recipes import recipes

    if any((folder / "plan.toml").is_file() for folder in (what, Path("runs") / what)):
        return False
    return what.suffix == ".toml" or str(what) in recipes()
