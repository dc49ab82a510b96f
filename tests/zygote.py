"""A process that has imported the package and forks a child per command.

Importing torch and the techniques takes seconds; a fork takes milliseconds. So a test can start,
kill and resume real processes by the dozen. Requests and answers are JSON, one a line, on standard
input and output. This process itself never computes: a child inherits no threads and no locks.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo
import torch._functorch.aot_autograd
import torch._inductor.compile_fx
import torch.distributed._tools.mem_tracker
import torch.distributed.pipelining

import headrace.cli.companions
import headrace.cli.plans
import headrace.cli.runs
import headrace.cli.train
import headrace.export.run
import headrace.inference.branch
import headrace.report.conclude
import headrace.report.single
import headrace.train.train
import headrace.tuner.ablate
import headrace.tuner.command
from headrace.cli.app import app
from headrace.cli.catalogue import catalogue

BESIDE = ("numpy.ctypeslib", "numpy.ma", "rustbpe", "house")
"""What else most children import, the last for functions of the contract that ranks call."""


def child(request: dict) -> int:
    """Run the command line, or one function of a Python file, and return the exit code."""
    os.chdir(request["cwd"])
    os.environ |= request["env"]
    for stream, name in ((1, "out"), (2, "err")):
        handle = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, stream)
    try:
        if "call" in request:
            file, function, arguments = request["call"]
            runpy.run_path(file)[function](**arguments)
        else:
            sys.argv = ["headrace", *request["argv"]]
            app()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Serve requests until standard input ends."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may run in the background
    catalogue()
    asks = {"house"} if torch.cuda.device_count() else set()  # a context of a GPU, which it begins
    for name in (n for n in BESIDE if n not in asks):
        with contextlib.suppress(ImportError):  # an extra that is not here
            importlib.import_module(name)
    headrace.report.conclude.SAMPLE_TOKENS = 8  # as the fixture `short_samples` does
    os.fsync = lambda fd: None  # as the fixture `no_wait_for_the_disk` does
    gc.collect()
    gc.freeze()  # no child's collector walks, and so copies, what all of them share
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            for name in ("out", "err"):  # a child may be killed before it opens them
                Path(request[name]).touch()
            answer = os.fork()
            if not answer:
                code = child(request)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
