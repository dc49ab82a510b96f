"""Run a GGUF file by llama.cpp, through the wheel `xllamacpp`.

That package gives llama.cpp's server: it listens on this machine alone, on a free port, and
answers only who has the key that is drawn for it here. Keys and values of attention are kept in 32
bits, and attention is computed by matrices, so that what differs from the model is the file.
"""

import json
import secrets
import struct
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError

from headrace.core.errors import ConfigError, RunError, UnsupportedError
from headrace.core.files import shell
from headrace.core.native import call_native
from headrace.export.gguf import INSTALL, SHA256, Origin, digest_of, gguf_package

FORCED = 1000.0
"""Added to the logit of a letter where probabilities are asked for: llama.cpp leaves them out after
a token that ends inside of a character, and it gives them as they were before this addition."""


class Continued(NamedTuple):
    """Say what a runtime wrote, and how fast."""

    ids: list[int]
    text: str
    prompt_tokens_per_s: float
    tokens_per_s: float


class TokenWork(NamedTuple):
    """Hold what one token takes."""

    weight_bytes: int
    cache_bytes: int
    multiplied: int
    """weights that it is multiplied with"""


def refuse_long(file: Path, context: int, prompt: int, tokens: int) -> None:
    """Refuse a text that has no room in the rows of an exported model.

    Args:
        file: the file.
        context: tokens of its longest row; 0 is no limit.
        prompt: tokens of the prompt.
        tokens: the most tokens to add.

    Raises:
        ConfigError: both together are longer.
    """
    if context and prompt + tokens > context:
        room = context - prompt
        raise ConfigError(
            f"a prompt of {prompt} tokens and {tokens} new ones need {prompt + tokens} places, "
            f"and {file} has {context}",
            f"--max-tokens {room}" if room > 0 else "--prompt TEXT with a shorter text",
        )


class LlamaCpp:
    """llama.cpp has opened one GGUF file."""

    def __init__(self, file: Path, prompt: str, tokens: int) -> None:
        """Open a file.

        Args:
            file: the file.
            prompt: what is to be continued, which has at most as many tokens as bytes.
            tokens: the most tokens to add.

        Raises:
            ConfigError: it is damaged, or the prompt and `tokens` are longer than its rows.
            UnsupportedError: xllamacpp is not installed, or cannot run this file.
        """
        try:
            import xllamacpp
        except ImportError:
            raise UnsupportedError(
                f"{file} is run by llama.cpp, whose wheel xllamacpp is not installed", INSTALL
            ) from None
        fields = _fields(file)
        kind = fields.get("general.architecture", "")
        self._file, self._tokens = file, tokens
        self._context = int(fields.get(f"{kind}.context_length", 0))
        self.name = f"llama.cpp (xllamacpp {xllamacpp.__version__})"
        self.origin = _origin(fields)
        self.quantized = _quantized(fields)
        room = len(prompt.encode()) + 2 + tokens
        self._key = secrets.token_hex(16)
        self._server = call_native(lambda: self._open(xllamacpp, kind, room))
        self._letter = self._ask("/tokenize", content="a", add_special=False)["tokens"][0]

    def _open(self, xllamacpp: Any, kind: str, room: int) -> Any:
        """Start llama.cpp's server; see `__init__` for errors."""
        params = xllamacpp.CommonParams()
        params.model.path = str(self._file)
        params.n_ctx = min(room, self._context) if self._context else room
        params.n_parallel, params.warmup, params.verbosity = 1, False, -1
        params.api_keys, params.fit_params = [self._key], False
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = off
        try:
            return xllamacpp.Server(params)
        except RuntimeError:
            raise UnsupportedError(
                f"{self.name} cannot load {self._file}, whose architecture is {kind!r}",
                "pip install --upgrade xllamacpp",
            ) from None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the token that begins it; none is special by its name.

        Raises:
            ConfigError: the text and the tokens to add are longer than the model's rows.
        """
        answer = self._ask("/tokenize", content=text, add_special=True, parse_special=False)
        ids: list[int] = answer["tokens"]
        refuse_long(self._file, self._context, len(ids), self._tokens)
        return ids

    def continue_(self, ids: Sequence[int], tokens: int) -> Continued:
        """Continue `ids` by at most so many of the likeliest tokens."""
        answer = self._ask(
            "/completion", prompt=[*ids], n_predict=tokens, temperature=0.0, return_tokens=True
        )
        times = answer["timings"]
        rates = times["prompt_per_second"], times["predicted_per_second"]
        return Continued(answer["tokens"], answer["content"], *rates)

    def log_probabilities(self, ids: Sequence[int]) -> dict[int, float]:
        """Return the log-probability in nats of each token that may follow `ids`, by id."""
        answer = self._ask(
            "/completion",
            prompt=[*ids],
            n_predict=1,
            temperature=0.0,
            n_probs=1 << 24,
            logit_bias=[[self._letter, FORCED]],
        )
        every = answer["completion_probabilities"][0]["top_logprobs"]
        return {one["id"]: one["logprob"] for one in every}

    @property
    def context(self) -> int:
        """Return the tokens of the longest text; 0 where the file says none."""
        return self._context

    def work(self, places: int) -> TokenWork:
        """Return what a token reads and multiplies behind so many others."""
        reader = gguf_package().GGUFReader(self._file)
        sizes = {one.name: (int(one.n_bytes), int(one.n_elements)) for one in reader.tensors}
        if "output.weight" in sizes:  # else the embedding is the output matrix too
            sizes.pop("token_embd.weight")
        fields = _fields(self._file)
        kind = fields["general.architecture"]
        heads, layers = fields[f"{kind}.attention.head_count"], fields[f"{kind}.block_count"]
        groups = fields.get(f"{kind}.attention.head_count_kv", heads)
        width = fields[f"{kind}.embedding_length"] // heads
        features = groups * fields.get(f"{kind}.attention.key_length", width)
        weights = sum(size for size, _ in sizes.values())
        return TokenWork(weights, 8 * layers * features * places, sum(n for _, n in sizes.values()))

    def decode_s(self, prompt: int, tokens: int) -> float:
        """Return the seconds that one token takes, over `tokens` of them behind a prompt."""
        ids = [self._letter] * prompt
        values = {"n_predict": tokens, "temperature": 0.0, "ignore_eos": True}
        times = self._ask("/completion", prompt=ids, **values)["timings"]
        return 1 / times["predicted_per_second"]

    def _ask(self, path: str, **values: Any) -> dict[str, Any]:
        """Return what the server answers.

        Raises:
            RunError: it refuses.
        """
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        asked = urllib.request.Request(
            self._server.listening_address + path, json.dumps(values).encode(), headers
        )
        no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with no_proxy.open(asked) as stream:
                return json.load(stream)
        except HTTPError as error:
            message = error.read().decode(errors="replace")
            raise RunError(f"{self.name} refuses {path}: {message}") from None


def _fields(file: Path) -> dict[str, Any]:
    """Return a file's numbers and texts by key; lists, as the tokens, are left out.

    Raises:
        ConfigError: it is no GGUF file, or a damaged one.
        UnsupportedError: the package `gguf` is not installed.
    """
    gguf, remedy = gguf_package(), f"another copy of {shell(file)}"
    with file.open("rb") as opened:
        begins = opened.read(4)
    if begins != b"GGUF":
        raise ConfigError(f"{file} is no GGUF file: it begins with {begins!r}", remedy)
    try:
        reader = gguf.GGUFReader(file)
        values = {
            key: field.contents()
            for key, field in reader.fields.items()
            if field.types[0] != gguf.GGUFValueType.ARRAY
        }
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, struct.error) as error:
        raise ConfigError(f"{file} is damaged or cut off: {error}", remedy) from None
    if SHA256 in values and values[SHA256] != (now := digest_of(file)):
        raise ConfigError(
            f"{file} is damaged: its sha256 is {now[:12]}, and {values[SHA256][:12]} was written",
            remedy,
        )
    return values


def _origin(fields: dict[str, Any]) -> Origin | None:
    """Return the run that a file says it is of, or None."""
    if "headrace.checkpoint" not in fields:
        return None
    begins = "headrace.fingerprint."
    digests = {k.removeprefix(begins): v for k, v in fields.items() if k.startswith(begins)}
    seal = fields["headrace.checkpoint"]
    return Origin(fields["headrace.run"], int(fields["headrace.step"]), seal, digests)


def _quantized(fields: dict[str, Any]) -> str:
    """Return how most matrices of a file are stored, as `headrace export --quantize` says it."""
    names = {0: "f32", 1: "f16", 2: "q4_0", 7: "q8_0"}
    return names.get(int(fields.get("general.file_type", -1)), "")
