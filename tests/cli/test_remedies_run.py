"""The remedy of each error is run as it is printed, and leads to another state."""

import ast
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from refusal_cases import CASES as REFUSED
from refusal_cases import EXCUSED
from remedies import sites
from remedy_adapters import ADAPTERS
from remedy_branches import BRANCHES
from remedy_cases import CASES, PLANS, SLOW
from remedy_chat import CHAT
from remedy_cleaning import CLEANING
from remedy_compress import COMPRESS, SPECS
from remedy_curriculum import CURRICULUM
from remedy_data import DATA
from remedy_dear import DEAR
from remedy_doctor import DOCTOR
from remedy_extend import EXTEND
from remedy_finetune import FINETUNE, TALKING
from remedy_gguf import GGUF, GGUF_IN_PYTHON
from remedy_inputs import INPUTS
from remedy_listed import BARE, LISTED
from remedy_places import MEANT, PLACES
from remedy_predictions import PREDICTIONS
from remedy_processes import PROCESSES
from remedy_python import PYTHON
from remedy_python_model import MODEL
from remedy_python_techniques import TECHNIQUES as IN_PYTHON
from remedy_quality import QUALITY
from remedy_rates import RATES
from remedy_recipes import RECIPES
from remedy_runs import RUNS
from remedy_tasks import TASKS
from remedy_techniques import TECHNIQUES
from remedy_trials import SLOW_TRIALS, TRIALS
from remedy_vision import VISION
from remedy_weights import GIVEN
from shell import Case, Told, follow, run, split

ROOT = Path(__file__).parents[2]
LEADS = (
    BRANCHES
    | COMPRESS
    | EXTEND
    | FINETUNE
    | GGUF
    | CASES
    | MEANT
    | RECIPES
    | RUNS
    | TRIALS
    | SLOW_TRIALS
    | TECHNIQUES
    | VISION
)
"""Commands whose remedies lead to another state."""
BROUGHT = INPUTS | TASKS | GIVEN | DOCTOR | DATA | CLEANING | PLACES | CURRICULUM | CHAT | ADAPTERS
"""What a user brings that is wrong: each way of these remedies ends in success."""
MADE = ("MemoryFull", "NoMoreThreads")
"""Errors that make their own remedy."""


@pytest.fixture
def here(site: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Move into a new folder with a copy of the run where the site needs one; return its path."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "demo"
    if site not in PLANS or site in BROUGHT:
        shutil.copytree(workshop / "runs" / "demo", folder, symlinks=True)
    else:
        folder.mkdir(parents=True)
    return folder


def marked(sites: Iterable[str]) -> list[Any]:
    """Return sites as parameters, of which those that take long to follow are slow."""
    slow = {*SLOW, *SLOW_TRIALS, *DEAR}
    return [pytest.param(s, marks=[pytest.mark.slow] * (s in slow)) for s in sites]


@pytest.mark.parametrize("site", marked(LEADS))
def test_a_remedy_leads_on(site: str, here: Path, tiny_demo: list[str]) -> None:
    followed(LEADS[site], site, here, tiny_demo)


@pytest.mark.parametrize("site", marked(BROUGHT))
def test_a_remedy_mends_what_was_brought(site: str, here: Path, tiny_demo: list[str]) -> None:
    for way, then in followed(BROUGHT[site], site, here, tiny_demo):
        assert not then.code, f"{way!r} ends in {then.message!r}"


@pytest.mark.parametrize("site", sorted(DEAR))
def test_a_remedy_that_takes_long_is_told(site: str, here: Path, tiny_demo: list[str]) -> None:
    followed((LEADS | BROUGHT)[site], site, here, tiny_demo, lead=False)


def followed(
    case: Case, site: str, here: Path, tiny_demo: list[str], *, lead: bool = True
) -> list[tuple[str, Told]]:
    """Every way of a remedy, and what came of it; a word after a site tells cases of it apart.

    Args:
        case: the command line that ends in the error.
        site: where the error is made.
        here: the folder of a run.
        tiny_demo: the words of a plan.
        lead: whether the remedy is followed, or read alone.
    """
    known: Any = {"tiny": " ".join(tiny_demo), "run": here}
    known["keys"] = " ".join(tiny_demo[1:])
    case.before(here)
    argv = split(case.argv, **known)
    with pytest.MonkeyPatch.context() as patch:
        case.fake(patch)
        told = run(argv)
        assert told.code and {site.split()[0], *case.through} <= {*told.sites}, told
        assert told.remedy, f"no remedy: {told.message}"
        if not lead:
            return []
        if case.lifted:
            patch.undo()
        ways = follow(case, argv, here, told.remedy, **known)
    print(told.message, "| TRY:", told.remedy, "| THEN:", ways)
    assert ways or case.prose
    for way, then in ways:
        assert then.message != told.message, f"{way!r} leads nowhere"
        assert not then.code or not any(w in then.message for w in ("no key", "No such option"))
    return ways


def room_of(site: str, rooms: Mapping[str, str]) -> str | None:
    """The line of a table that a site belongs to."""
    module = site.partition(":")[0]
    for room in rooms:
        if room in (site, module) or (room.endswith("/") and module.startswith(room)):
            return room
    return None


def test_every_error_is_run_or_listed() -> None:
    cases = LEADS | BROUGHT
    through = [site for case in cases.values() for site in case.through]
    run_here = {site.split()[0] for site in cases}
    in_python = {
        *GGUF_IN_PYTHON,
        *PYTHON,
        *TALKING,
        *MODEL,
        *SPECS,
        *IN_PYTHON,
        *RATES,
        *QUALITY,
        *PREDICTIONS,
    }
    known = {*run_here, *through, *in_python, *PROCESSES, *REFUSED, *EXCUSED}
    assert known <= {*sites()}, "a table names an error that is no more"
    left = [site for site in sites() if site not in known]
    assert [site for site in left if room_of(site, LISTED) is None] == []
    assert {room_of(site, LISTED) for site in left} == {*LISTED}, "a line of the list is stale"


@pytest.mark.parametrize(("file", "test"), sorted({*PROCESSES.values()}))
def test_a_remedy_that_processes_run_has_its_test(file: str, test: str) -> None:
    assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text()


def test_no_error_is_without_a_remedy() -> None:
    bare = [site for site, call in sites().items() if without_remedy(call)]
    assert [site for site in bare if room_of(site, BARE) is None] == []


def without_remedy(call: ast.Call) -> bool:
    """Whether an error is made without a remedy, or with an empty one in some case."""
    if getattr(call.func, "id", "") in MADE or any(isinstance(a, ast.Starred) for a in call.args):
        return False
    if len(call.args) < 2:
        return not any(word.arg == "remedy" for word in call.keywords)
    remedy = call.args[1]
    ways = [remedy.body, remedy.orelse] if isinstance(remedy, ast.IfExp) else [remedy]
    return any(isinstance(way, ast.Constant) and not way.value for way in ways)


def test_an_empty_remedy_is_seen() -> None:
    for text, bare in (
        ("E('a')", True),
        ("E('a', '')", True),
        ("E('a', 'b' if c else '')", True),
        ("E('a', 'b')", False),
        ("E('a', remedy='b')", False),
        ("E(*both)", False),
    ):
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and without_remedy(call) is bare, text
