"""Conversations that cannot be trained on, and their templates: each remedy mends them."""

import json
from pathlib import Path
from typing import Any

from remedy_inputs import MAKE
from remedy_places import swallows_blocks
from shell import Case
from shell import run as run_command

from headrace.data.tokenizer import train_tokenizer

PLAN = """
goal = { steps = 3 }
data = { sources = "c.jsonl", tokenizer = "own", validation = 0.3, sequence_length = 16 }
"""
TALK = [
    {
        "messages": [
            {"role": "user", "content": f"the mill {n}"},
            {"role": "assistant", "content": a},
        ]
    }
    for n, a in enumerate(("below", "the gate", "a weir of stone", "no", "yes, at the lock") * 4)
]
OWN = "data ingest own.toml data.directory=prepared"
CHATML = f"{OWN} data.chat.template=chatml"
PAIRED = (
    "train own.toml device=cpu guard=false data.chat.template=chatml data.chat.kind=preference "
    "batch.tokens=512 --with preference"
)
BAD = {"messages": [{"role": "user", "content": 7}]}


def talk(*more: Any, template: str = "", files: dict[str, str] | None = None) -> MAKE:
    """Write a plan, its tokenizer and its conversations, with some more of them."""

    def make(_: Path) -> None:
        Path("own.toml").write_text(PLAN)
        Path("own").mkdir()
        train_tokenizer(["the mill below the weir "], vocab=270).save(Path("own/tokenizer.json"))
        Path("c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*more, *TALK)))
        Path("t.jinja").write_text(template)
        Path("marked.jinja").write_text(
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
        )
        for name, text in (files or {}).items():
            Path(name).write_text(text)

    return make


def swallows(run: Path) -> None:
    """Write a tokenizer that takes U+2581 for a blank, and a conversation that has it."""
    swallows_blocks(run)
    talk({"prompt": "a", "completion": "a\u2581b"})(run)
    Path("tok.json").replace("own/tokenizer.json")


def pairs(*more: Any) -> MAKE:
    """Write a plan of preference pairs, with some more of them."""

    def make(run: Path) -> None:
        talk()(run)
        rows = [{"prompt": str(n), "chosen": "the gate", "rejected": "a weir"} for n in range(20)]
        Path("c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*more, *rows)))
        Path("own.toml").write_text(f"{PLAN}model = {{ dim = 8, layers = 1, heads = 1 }}\n")

    return make


def alike(run: Path) -> None:
    """Write pairs of two equal answers."""
    pairs()(run)
    file = Path("c.jsonl")
    file.write_text(file.read_text().replace("a weir", "the gate"))


def questions(run: Path) -> None:
    """Write conversations without an answer."""
    talk()(run)
    asked = [{"messages": [{"role": "user", "content": f"the mill {n} below"}]} for n in range(40)]
    Path("c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))


def damaged(run: Path) -> None:
    """Prepare conversations, and cut their record off."""
    talk()(run)
    assert not run_command(CHATML.split()).code
    (file,) = Path("prepared").glob("*/chat.json")
    file.write_text("{")


def table(lines: str) -> MAKE:
    """Write a plan with a table of its own."""

    def make(run: Path) -> None:
        talk()(run)
        Path("own.toml").write_text(PLAN + lines)

    return make


CHAT = {
    "data/chat/conversation:ChatReading.text_of#1": Case(CHATML, talk(7)),
    "data/chat/conversation:ChatReading.text_of#2": Case(
        f"{CHATML} data.chat.kind=completion", talk()
    ),
    "data/chat/conversation:ChatReading.text_of#3": Case(
        CHATML, talk({"body": "a"}), fills={"data.text_key=FIELD": "data.text_key=body"}
    ),
    "data/chat/conversation:ChatReading.text_of#4": Case(CHATML, pairs()),
    "data/chat/conversation:ChatReading._pair_of#1": Case(
        f"{CHATML} data.chat.kind=preference", pairs({"chosen": "b", "rejected": "c"})
    ),
    "plan/chat:ChatConfig._check_pairs#1": Case(
        f"{CHATML} data.chat.kind=preference data.chat.train_on=all", pairs()
    ),
    "data/packing/pairs:PairRows.__init__#1": Case(PAIRED, pairs()),
    "techniques/adapt/preference:Preference._check_knobs#1": Case(
        f"{PAIRED} data.sequence_length=256 techniques.preference.gamma=1", pairs()
    ),
    "techniques/adapt/preference:Preference._check_knobs#2": Case(
        f"{PAIRED} data.sequence_length=256 techniques.preference.loss=ipo "
        "techniques.preference.label_smoothing=0.1",
        pairs(),
    ),
    "data/chat/record:ChatRecord.nothing_left#1": Case(f"{CHATML} data.chat.max_tokens=4", talk()),
    "data/chat/record:ChatRecord.nothing_left#1 questions": Case(CHATML, questions),
    "data/chat/record:ChatRecord.nothing_left#1 pairs": Case(
        f"{CHATML} data.chat.kind=preference", alike
    ),
    "data/chat/conversation:_message#1": Case(CHATML, talk({"messages": [{"content": "a"}]})),
    "data/chat/conversation:_refuse#1": Case(CHATML, talk(BAD)),
    "data/chat/encode:template_of#2": Case(
        f"{OWN} data.chat.kind=auto", talk(), fills={"PATH": "marked.jinja"}
    ),
    "data/chat/encode:template_of#3": Case(
        f"{OWN} data.chat.template=t.jinja", talk(template="{% for m in messages %}")
    ),
    "data/chat/encode:_read#1": Case(
        f"{OWN} data.chat.template=t.jinja", talk(template=" " * (5 << 20))
    ),
    "data/chat/encode:_read#2": Case(f"{OWN} data.chat.template=own", talk()),
    "data/chat/encode:_beside#1": Case(
        CHATML, talk(files={"own/tokenizer_config.json": "{"}), whole=True
    ),
    "data/chat/encode:ChatEncoder._rendered#1": Case(
        f"{OWN} data.chat.template=t.jinja",
        talk(template="{{ raise_exception('no system') }}"),
        prose={"the conversation out of the data": "it is the whole text here"},
    ),
    "data/chat/encode:ChatEncoder._rendered#2": Case(
        f"{OWN} data.chat.template=t.jinja",
        talk(template="{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}"),
        fills={"PATH": "marked.jinja"},
    ),
    "data/chat/encode:ChatEncoder._check#1": Case(
        CHATML,
        swallows,
        prose={"which every report tells": "it says what the key does"},
        fills={"data.tokenizer=PATH of another": "data.lossy_tokenizer=true"},
    ),
    "data/chat/record:ChatRecord.load#1": Case(CHATML, damaged, whole=True),
    "plan/data_config:DataConfig._check_chat#1": Case(f"{CHATML} data.separator=x", talk()),
    "plan/data_config:DataConfig._check_chat#2": Case(
        f"{CHATML} data.deduplication.method=paragraph", talk()
    ),
    "data/chat/encode:template_of#1": Case(
        f"{CHATML} data.tokenizer=bpe", talk(), fills={"PATH of a tokenizer.json": "own"}
    ),
}
