"""Save checkpoints that cannot run code, are never incomplete, and load under any layout.

A checkpoint is a folder `step-N` that holds one safetensors file per rank and one
`checkpoint.json`: counters, loader state, and where every piece of every tensor lies. A piece is a
box (offset, shape) of a global tensor, so any set of ranks can read what another set wrote. Nothing
is a pickle. (torch.distributed.checkpoint keeps its index as a pickle; a manipulated index runs
code.)

Saving copies tensors to the host, then a thread writes `step-N.tmp`, flushes it to the disk and
renames it; removal first renames it to another name. So a folder named `step-N` is complete by
construction. `latest` and `best` are links that are derived from the folders at every start.
"""

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from filelock import BaseFileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.core.command import train_command
from headrace.core.errors import ConfigError, RunError, is_out_of_memory
from headrace.core.files import has_file, hold_lock, publish, sha256_of, sync_path, write_whole
from headrace.core.units import format_bytes
from headrace.parallel.boxes import Box, TensorPart, piece_of
from headrace.train.copies import Copies

FORMAT = 1
INDEX = "checkpoint.json"
TORCH_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16",
    "U32": "uint32", "U64": "uint64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""Name of a type in a safetensors file -> its name in torch."""
WAIT_FOR_RANKS_S = 600.0


class RankGone(RunError):
    """A rank ended before its part of a checkpoint was written."""


class Checkpoints:
    """Save, link and remove the checkpoints of one run.

    Args:
        folder: the folder that holds them.
        rank: the rank of this process.
        ranks: the number of ranks of the run.
        keep_last: how many of the newest are kept beside the best.
        log: called with a line when one is complete.
        alone: whether the folder holds this rank's part only.
    """

    def __init__(
        self, folder: Path, *, rank: int, ranks: int, keep_last: int,
        log: Callable[[str], None] = lambda line: None, alone: bool = False,
    ) -> None:  # fmt: skip
        self._log = log
        self.folder, self.rank, self.ranks, self.keep_last = folder, rank, ranks, keep_last
        self._thread: threading.Thread | None = None
        self._leads, self._members = alone or rank == 0, (rank,) if alone else range(ranks)
        self.go_on = train_command(folder.parent, "--resume")
        self._error: BaseException | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if self._leads:
            sync_path(folder.parent)
        self._alive: BaseFileLock | None = None
        self._show_alive()
        if self._leads:
            for left_over in folder.glob("*.tmp"):
                shutil.rmtree(left_over)
            self._link()

    # --- saving ---

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor | TensorPart],
        values: dict[str, Any],
        before_change: list[Callable[[], None]] | None = None,
    ) -> None:
        """Begin to save, and return when the next update can no longer change the copies.

        Args:
            step: the number of completed steps.
            tensors: this rank's tensors, or pieces of them, by global name.
            values: JSON values, the same on every rank (those under "rank" may differ); "score"
                rates the weights for `best`: lower is better.
            before_change: see `Copies`; without it copies from a GPU are awaited here.

        Raises:
            RunError: the previous save failed.
        """
        self.wait()
        host, pieces, total, copies = {}, {}, 0, Copies(before_change)
        for name, tensor in tensors.items():
            piece = tensor if isinstance(tensor, TensorPart) else piece_of(tensor)
            if not piece.writes:
                continue
            host[name] = copies.to_host(piece.local.detach())
            pieces[name] = {
                "shape": list(piece.shape),
                "dtype": str(piece.local.dtype).removeprefix("torch."),
                "offset": list(piece.box.offset),
                "size": list(piece.box.shape),
            }
            total += piece.local.nbytes
        copies.end()
        self._check_space(step, total)
        work = (copies, step, host, pieces, values)
        thread = threading.Thread(target=self._guarded, args=work, name="checkpoint", daemon=True)
        thread.start()
        self._thread = thread  # one that could not start cannot be waited for

    def wait(self, *, failed: bool = False) -> None:
        """Wait for the save in progress, or with `failed` only for one that has failed.

        Raises:
            RunError: the save failed; earlier checkpoints are intact.
        """
        if failed and self._error is None:
            return
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, RunError):
                raise error
            raise RunError(
                f"saving a checkpoint in {self.folder} failed: {error}; {self.intact()}",
                f"free some space, then {self.go_on}",
            ) from error

    def _check_space(self, step: int, need_bytes: int) -> None:
        what = f"checkpoint step-{step}"
        check_space(self.folder, need_bytes, what, self.intact(), self.go_on)

    def intact(self) -> str:
        """Return in words which checkpoint is left."""
        steps = self.steps()
        return f"step-{steps[-1]} is intact" if steps else "no earlier checkpoint exists"

    def _guarded(self, copies: Copies, *work: Any) -> None:
        try:
            copies.wait()
            self._write(*work)
        except BaseException as error:
            self._error = error
            if self._leads:
                shutil.rmtree(self.folder / f"step-{work[0]}.tmp", ignore_errors=True)

    def _write(
        self, step: int, host: dict[str, Tensor], pieces: dict[str, Any], values: dict[str, Any]
    ) -> None:
        self._show_alive()
        aside = self.folder / f"step-{step}.tmp"
        aside.mkdir(exist_ok=True)
        name = f"rank-{self.rank:05d}.safetensors"
        save_file(host, aside / name)
        sync_path(aside / name)
        part = {
            "file": name,
            "bytes": (aside / name).stat().st_size,
            "sha256": sha256_of(aside / name),
            "pieces": pieces,
            "rank_values": values.pop("rank", {}),
        }
        write_whole(aside / f"rank-{self.rank:05d}.json", json.dumps(part))
        if not self._leads:
            return
        parts = [self._read_part(aside, rank) for rank in self._members]
        index = _sealed({"format": FORMAT, "step": step, "parts": parts, **values})
        write_whole(aside / INDEX, json.dumps(index))
        for rank in self._members:
            (aside / f"rank-{rank:05d}.json").unlink()
        if step in self.steps():
            self._discard(step)
        publish(aside, self.folder / f"step-{step}")
        self._log(f"step {step}: saved {self.folder / f'step-{step}'}")
        self._prune()

    def _read_part(self, aside: Path, rank: int) -> dict[str, Any]:
        """Return another rank's part of the index, after waiting until it is written."""
        path = aside / f"rank-{rank:05d}.json"
        part = aside.name.removesuffix(".tmp")
        give_up = time.monotonic() + WAIT_FOR_RANKS_S
        while not path.exists():
            if time.monotonic() > give_up:
                raise RunError(
                    f"rank {rank} did not finish its part of {part} in "
                    f"{WAIT_FOR_RANKS_S / 60:.0f} minutes; {self.intact()}",
                    f"{self.go_on}, once what holds up rank {rank} is mended",
                )
            if self.has_ended(rank) and not path.exists():
                raise RankGone(
                    f"rank {rank} ended before its part of {part} was written; {self.intact()}",
                    f"{self.go_on}, once what ended rank {rank} is mended",
                )
            time.sleep(0.01)
        return json.loads(path.read_text())

    def _show_alive(self) -> None:
        """Hold this rank's lock, which the system releases when the process ends.

        Where an earlier process of this rank still holds it, the next save tries again.
        """
        if len(self._members) == 1 or self._alive is not None:
            return
        for _ in range(20):
            with suppress(Timeout):  # or the first rank is testing it just now
                self._alive = hold_lock(self._lock_of(self.rank), wait=False, key="directory")
                return
            time.sleep(0.01)

    def _lock_of(self, rank: int) -> Path:
        return self.folder.parent / f".{self.folder.name}-rank-{rank:05d}.lock"

    def has_ended(self, rank: int) -> bool:
        """Return whether another rank's process is gone: no process holds its lock."""
        if rank == self.rank or not self._lock_of(rank).exists():
            return False
        try:
            hold_lock(self._lock_of(rank), wait=False, key="directory").release()
        except Timeout:
            return False
        return True

    def amend(self, step: int, values: dict[str, Any]) -> None:
        """Replace the values of a complete checkpoint; its tensors stay.

        Raises:
            RunError: the save in progress failed.
        """
        self.wait()
        if self.rank != 0:
            return
        index = self.folder / f"step-{step}" / INDEX
        kept = {k: v for k, v in values.items() if k != "rank"}
        write_whole(index, json.dumps(_sealed({**json.loads(index.read_text()), **kept})))
        self._prune()

    def _prune(self) -> None:
        best = self._link()
        for old in self.steps()[: -self.keep_last]:
            if old != best:
                self._discard(old)

    def _link(self) -> int | None:
        """Point `latest` and `best` at the complete checkpoints, and return the best step."""
        for link in ("latest", "best"):
            self._unfollow(self.folder / link)
        steps = self.steps()
        scores = {step: score for step in steps if (score := self._score(step)) is not None}
        best = min(scores, key=lambda step: scores[step], default=None)
        self._point("latest", steps[-1] if steps else None)
        self._point("best", best)
        return best

    def _unfollow(self, link: Path) -> None:
        """Replace a folder `latest` or `best`, from a copy that followed links, by one `step-N`."""
        step = None if link.is_symlink() else self._index(link).get("step")
        if step is not None and (self.folder / f"step-{step}").is_dir():
            shutil.rmtree(link)
        elif step is not None:
            os.rename(link, self.folder / f"step-{step}")

    def _score(self, step: int) -> float | None:
        return self._index(self.folder / f"step-{step}").get("score")

    def _index(self, folder: Path) -> dict[str, Any]:
        try:
            parsed = json.loads((folder / INDEX).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}  # damaged: loading it reports that
        return parsed if isinstance(parsed, dict) else {}

    def _point(self, link: str, step: int | None) -> None:
        path, aside, target = self.folder / link, self.folder / f".{link}", f"step-{step}"
        if step is None:
            path.unlink(missing_ok=True)
        elif not path.is_symlink() or os.readlink(path) != target:
            aside.unlink(missing_ok=True)
            os.symlink(target, aside)
            os.replace(aside, path)

    def _discard(self, step: int) -> None:
        """Remove a checkpoint; a kill leaves it complete or under a name that is never read."""
        aside = self.folder / f"step-{step}.old.tmp"
        os.rename(self.folder / f"step-{step}", aside)
        shutil.rmtree(aside)

    # --- loading ---

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        return steps_in(self.folder)

    def latest(self) -> Path | None:
        """Return the folder of the newest complete checkpoint; None where there is none."""
        steps = self.steps()
        return self.folder / f"step-{steps[-1]}" if steps else None


def check_space(folder: Path, need_bytes: int, what: str, intact: str, command: str) -> None:
    """Refuse to write what a disk has no room for.

    Args:
        folder: the folder that it would be written into.
        need_bytes: its size in bytes.
        what: what is to be written, for the message.
        intact: what stays intact, for the message.
        command: the command to type once there is room.

    Raises:
        RunError: the disk lacks room; the message has both sizes.
    """
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise RunError(
            f"{what} needs {format_bytes(need_bytes)} and {folder} has {format_bytes(free)} free; "
            f"{intact}",
            f"free some space, then {command}",
        )


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in order."""
    numbers = (p.name.removeprefix("step-") for p in folder.glob("step-*"))
    return sorted(int(n) for n in numbers if n.isascii() and n.isdigit())


class Saved:
    """Read one complete checkpoint.

    Args:
        path: the folder `step-N`.
        verify: whether to compare the sha256 of every file too.

    Raises:
        RunError: a file is missing, truncated or changed; names it and how to go on.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path = path = path.with_name(path.resolve().name)  # so that messages name no link
        if not (path / INDEX).is_file():
            raise self.damaged("it is missing")
        try:
            self.values: dict[str, Any] = json.loads((path / INDEX).read_text())
            if self.values["format"] != FORMAT:
                raise ConfigError(
                    f"{path} has format {self.values['format']}; this version reads {FORMAT}",
                    "the version of Headrace that wrote it",
                )
            if _sealed(self.values)["seal"] != self.values["seal"]:
                raise self.damaged("its sha256 differs from the one saved")
            self.parts: list[dict[str, Any]] = self.values["parts"]
            self._check_files(verify)
            self._where = self._index()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self.damaged(f"it is not readable ({error})") from None

    def _check_files(self, verify: bool) -> None:
        for part in self.parts:
            file = self.path / Path(part["file"]).name
            size = file.stat().st_size if has_file(self.path, file.name) else -1
            if size < 0:
                raise self.damaged("it is missing", file.name)
            if size != part["bytes"]:
                raise self.damaged(f"it has {size} bytes of {part['bytes']}", file.name)
        if not verify:
            return
        files = [self.path / Path(p["file"]).name for p in self.parts]
        with ThreadPoolExecutor() as pool:
            for part, digest in zip(self.parts, pool.map(sha256_of, files), strict=True):
                if digest != part["sha256"]:
                    raise self.damaged("its sha256 differs from the one saved", part["file"])

    def damaged(self, how: str, file: str = INDEX) -> RunError:
        """Return the error of a file that differs from what was saved, or of a malformed index."""
        others = [n for n in steps_in(self.path.parent) if f"step-{n}" != self.path.name]
        message = f"the checkpoint {self.path} is damaged: {file}: {how}"
        return RunError(message, self.instead(others))

    def instead(self, others: list[int]) -> str:
        """Return what to add to the command: the newest of the steps `others`, or a new run's name.

        It holds no path of the run itself, because a fork that cannot begin is removed.
        """
        return f"--checkpoint step-{others[-1]}" if others else "name=NEW, without --resume"

    def names(self) -> set[str]:
        """Return the names of all saved tensors."""
        return set(self._where)

    def names_under(self, prefix: str) -> list[str]:
        """Return the names of the saved tensors that begin with `prefix`."""
        return [name for name in self._where if name.startswith(prefix)]

    def shape_of(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the global shape and the dtype of a saved tensor."""
        _, piece = self._where[name][0]
        dtype = getattr(torch, str(piece.get("dtype")), None)
        if not isinstance(dtype, torch.dtype):
            raise self.damaged(f"{name} has no dtype of torch: {piece.get('dtype')!r}")
        if not isinstance(shape := piece.get("shape"), list):
            raise self.damaged(f"{name} has no shape: {shape!r:.40}")
        return tuple(shape), dtype

    def fill_(self, name: str, tensor: Tensor | TensorPart, *, converts: bool = False) -> None:
        """Copy the saved tensor `name` into `tensor`, whatever the layouts of both.

        Args:
            name: the name of the saved tensor.
            tensor: the tensor to fill.
            converts: whether the saved tensor may have another floating type than `tensor`.

        Raises:
            RunError: the saved tensor is missing, or has another shape or type.
        """
        local, wanted, box, _ = tensor if isinstance(tensor, TensorPart) else piece_of(tensor)
        if name not in self._where:
            raise self.damaged(f"it holds no tensor {name!r}")
        shape, dtype = self.shape_of(name)
        if shape != wanted:
            raise self.damaged(f"{name} has shape {wanted}; it holds {shape}")
        if dtype != local.dtype and not (converts and dtype.is_floating_point):
            raise self.damaged(f"{name} is {local.dtype}; it holds {dtype}")
        try:
            filled = self._copy(name, local, box)
        except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise self.damaged(f"{name} cannot be read ({error})") from None
        if filled != local.numel():
            raise self.damaged(f"{name} covers {filled} of {local.numel()} numbers")

    def _copy(self, name: str, local: Tensor, box: Box) -> int:
        """Copy what a box covers of a saved tensor, and return how many numbers that were."""
        filled = 0
        for file, piece in self._where[name]:
            piece_box = Box(tuple(piece["offset"]), tuple(piece["size"]))
            common = box.overlap(piece_box) if box.shape else Box((), ())
            if common is None:
                continue
            try:
                with safe_open(file, framework="pt") as opened:
                    self._check_piece(name, opened.get_slice(name), piece)
                    saved = opened.get_slice(name) if box.shape else opened.get_tensor(name)
                    value = saved[common.within(piece_box)] if box.shape else saved
            except SafetensorError as error:
                raise self.damaged(str(error), file.name) from None
            with torch.no_grad():
                local[common.within(box)].copy_(value)
            filled += value.numel()
        return filled

    def _check_piece(self, name: str, stored: Any, piece: Mapping[str, Any]) -> None:
        """Refuse a piece whose shape or type in its file differs from the index."""
        shape, dtype = stored.get_shape(), stored.get_dtype()
        if len(piece["offset"]) != len(shape):
            raise self.damaged(f"{name} lies at {piece['offset']}, which is no place of it")
        if shape != piece["size"] or TORCH_DTYPES.get(dtype) != piece["dtype"]:
            expected = f"{piece['dtype']} {piece['size']}"
            raise self.damaged(
                f"{name} is {TORCH_DTYPES.get(dtype, dtype)} {shape}, not {expected}"
            )

    def _index(self) -> dict[str, list[tuple[Path, dict[str, Any]]]]:
        """Return the files and pieces of each tensor; of equal pieces only the first."""
        where: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
        seen: set[tuple[str, str]] = set()
        for part in self.parts:
            for name, piece in part["pieces"].items():
                box = (name, str(piece["offset"]))
                if box not in seen:
                    where.setdefault(name, []).append((self.path / Path(part["file"]).name, piece))
                seen.add(box)
        return where


def _sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with the sha256 of everything in them except "seal" as the key "seal"."""
    bare = {k: v for k, v in values.items() if k != "seal"}
    digest = hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()
    return {**bare, "seal": digest}
