"""The shape of a decoder: what `model.*` in a plan means. Families are defaults for these keys."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headrace.core.folders import Folder
from headrace.core.limits import WIDEST
from headrace.core.remedy import Remedy, mend
from headrace.core.strict import Strict, Wrong
from headrace.core.units import largest_divisor

Positive = Annotated[int, Field(ge=1, le=WIDEST)]


class RopeScaling(Strict):
    """A rule that slows rotations down; `none` leaves them."""

    kind: Literal["none", "linear", "ntk", "dynamic", "yarn", "llama3"] = "none"
    """Every frequency / factor; a larger base; one that grows with a document's length; a ramp from
    fast pairs to slow ones (arXiv 2309.00071); or Llama 3.1's smooth step."""
    factor: float = Field(default=1.0, ge=1, le=1e6)
    """How many times longer rows become."""
    original_length: int = Field(default=0, ge=0, le=1 << 24)
    """Tokens of a row of pretraining, which yarn and llama3 count turns in, and beyond which the
    base of dynamic grows."""
    beta_fast: float = Field(default=32.0, gt=0, le=1e6)
    """yarn: pairs with more turns than this within such a row stay as they are."""
    beta_slow: float = Field(default=1.0, gt=0, le=1e6)
    """yarn: pairs with fewer turns than this turn `factor` times slower."""
    low_frequency_factor: float = Field(default=1.0, gt=0, le=1e6)
    """llama3: pairs with fewer turns than this turn slower by `factor`."""
    high_frequency_factor: float = Field(default=4.0, gt=0, le=1e6)
    """llama3: pairs with more turns than this stay as they are."""


class ModelConfig(Strict):
    """One decoder-only transformer. Sizes are in features or counts, never in bytes."""

    family: str = "headrace"
    """Defaults for the other keys, from `headrace list --families`."""
    vocab: int = Field(default=0, ge=0, le=WIDEST)
    """Rows of the embedding; 0 takes the tokenizer's size, rounded up to `vocab_multiple`."""
    vocab_multiple: Positive = 64
    """The embedding is padded to a multiple of this many rows (matrix kernels like it)."""
    dim: Positive = 256
    """Features of the residual stream."""
    layers: int = Field(default=4, ge=1, le=100_000)
    """Blocks."""
    heads: int = Field(default=4, ge=1, le=100_000)
    """Query heads."""
    kv_heads: int = Field(default=0, ge=0, le=100_000)
    """Key and value heads; 0 means as many as `heads` (no grouping)."""
    head_dim: int = Field(default=0, ge=0, le=1 << 16)
    """Features of a head; 0 means dim / heads."""
    ffn: int = Field(default=0, ge=0, le=WIDEST)
    """Hidden features of the MLP; 0 means 8/3 dim (swiglu) or 4 dim, rounded up to 32."""
    norm: Literal["rms_norm", "unit_rms_norm", "layer_norm"] = "rms_norm"
    """Normalisation before attention, before the MLP and at the end; unit_rms_norm has no weights,
    nor have the norms of queries and keys beside it."""
    norm_eps: float = Field(default=1e-5, gt=0, le=1)
    """Added to the mean square."""
    activation: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu2"] = "swiglu"
    """The MLP's nonlinearity; swiglu and geglu (of gelu_tanh, as in Gemma) are gated and have three
    matrices."""
    position: Literal["rope", "learned", "none"] = "rope"
    """How tokens know their place."""
    rope_theta: float = Field(default=10_000.0, gt=0, le=1e12)
    """Base of the rotation's wavelengths."""
    rope_scaling: RopeScaling = RopeScaling()
    """How rotations are slowed for rows longer than those of pretraining, as weights have it."""
    local_rope_theta: float = Field(default=0.0, ge=0, le=1e12)
    """Base of the rotation, unscaled, in the layers that have the window; 0 is `rope_theta` and its
    scaling there too. Gemma 3 has 10,000 (arXiv 2503.19786)."""
    window: int = Field(default=0, ge=0, le=WIDEST)
    """Tokens that a token sees, itself included; 0 is all before it (arXiv 2310.06825)."""
    window_between: int = Field(default=0, ge=0, le=100_000)
    """Layers with the window between two without it; 0 is no layer without: 1 in Gemma 2, 5 in
    Gemma 3."""
    attention_cap: float = Field(default=0.0, ge=0, le=1e6)
    """Scores of attention are cap x tanh(score / cap), as in Gemma 2 (50); 0 leaves them."""
    query_scale: float = Field(default=1.0, gt=0, le=1e6)
    """Queries are multiplied by it, beside 1 / sqrt(head_dim)."""
    context: int = Field(default=0, ge=0, le=WIDEST)
    """Most positions that `learned` holds; 0 means data.sequence_length."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, per head, before the rotation (arXiv 2302.05442)."""
    embedding_norm: bool = False
    """RMSNorm without weights after the embedding, as in nanochat and modded-nanogpt."""
    embedding_residual: bool = False
    """Each block begins with a x + b x0, of the stream x and of what the first block reads, x0; a
    and b are learned, 1 and 0 at first (modded-nanogpt)."""
    value_embeddings: int = Field(default=0, ge=0, le=100_000)
    """Embedding tables that are mixed into attention's values by learned factors, 0.5 each at
    first: table i in block i, and in the block as far before the last ones' end (modded-nanogpt).
    At most half of the layers, rounded up."""
    bigram_multiple: int = Field(default=0, ge=0, le=100_000)
    """Rows of a table for pairs of a token and the one before it, in multiples of `vocab`; pairs
    share them by a hash. A pair's row is added to the token's embedding; 0 is no such table."""
    embedding_smear: bool = False
    """A token's embedding gets a learned share of each feature of that of the token before, 0 at
    first (modded-nanogpt)."""
    embedding_scale: float = Field(default=1.0, gt=0, le=1e6)
    """What the first block reads is the embedding times this; sqrt(dim) in Gemma."""
    post_norms: bool = False
    """Norms of what attention and MLP give to the stream, beside those before them (Gemma 2)."""
    tied_embeddings: bool = False
    """The output matrix is the embedding."""
    logit_cap: float = Field(default=0.0, ge=0, le=1e6)
    """Logits are logit_cap x tanh(logits / logit_cap), as in Gemma 2 (30, arXiv 2408.00118) and
    nanochat (15); 0 leaves them as they are."""
    bias: bool = False
    """Biases in the linears of attention and MLP, as GPT-2 has."""
    qkv_bias: bool = False
    """Biases of queries, keys and values alone, as Qwen 2 has."""
    output_init: Literal["depth_scaled", "zero", "plain"] = "depth_scaled"
    """How the two projections that write to the residual start."""
    matrix_init: Literal["normal", "he", "orthogonal"] = "normal"
    """How the matrices of blocks are drawn: with `init_std`; with sqrt(2 / inputs) of each matrix
    (arXiv 1502.01852); or orthonormal in rows or columns (arXiv 1312.6120)."""
    head_init: Literal["normal", "zero"] = "normal"
    """How the output matrix starts; a tied one is the embedding, and cannot be zero."""
    init_std: float = Field(default=0.02, gt=0, le=1e3)
    """Standard deviation of initial weights."""
    pretrained: Folder = ""
    """A folder with config.json and safetensors to start from instead of random weights."""
    adapter: Folder = ""
    """A folder of adapters in PEFT's format, beside the weights of `pretrained`. A technique of
    adapters trains them on; without one they are added to the weights."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic: fp32, or autocast to bf16 or fp16 over fp32 weights; auto is bf16 on a GPU. fp16
    needs a technique that scales the loss."""

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        kv = self.kv_heads or self.heads
        if self.heads % kv:
            fit = largest_divisor(self.heads, kv)
            raise Wrong(
                f"heads = {self.heads} is not a multiple of kv_heads = {kv}; "
                f"the nearest that fits is model.kv_heads={fit}",
                mend(f"model.kv_heads={fit}"),
            )
        if self.value_embeddings > (most := -(-self.layers // 2)):
            raise Wrong(
                f"value_embeddings = {self.value_embeddings} tables, and {self.layers} layers have "
                f"at most {most}: each serves one of the first and one of the last",
                mend(f"model.value_embeddings={most}"),
            )
        if self.tied_embeddings and self.head_init == "zero":
            raise Wrong(
                "head_init = 'zero' and tied_embeddings: the output matrix is the embedding, and a "
                "model of zeros learns nothing",
                mend("model.tied_embeddings=false") | mend("model.head_init=normal"),
            )
        if not self.head_dim and self.dim % self.heads:
            unit = self.heads * (2 if self.position == "rope" else 1)  # rope wants an even head_dim
            near = max(unit, round(self.dim / unit) * unit)
            raise Wrong(
                f"dim = {self.dim} is not a multiple of heads = {self.heads}; the nearest that "
                f"fits is model.dim={near} (or give model.head_dim)",
                mend(f"model.dim={near}"),
            )
        if self.position == "rope" and self.resolved_head_dim % 2:
            raise Wrong(
                f"rope needs an even head_dim, and it is {self.resolved_head_dim}; "
                f"the nearest is model.head_dim={self.resolved_head_dim + 1}",
                mend(f"model.head_dim={self.resolved_head_dim + 1}"),
            )
        if self.adapter and not self.pretrained:
            raise Wrong(
                f"adapter = {self.adapter!r} and no model.pretrained: adapters stand beside the "
                "weights that they were trained with",
                Remedy(text="model.pretrained=FOLDER of these weights,") | mend("model.adapter="),
            )
        idle = [name for name in ("window_between", "local_rope_theta") if getattr(self, name)]
        if idle and not self.window:
            raise Wrong(
                f"{' and '.join(idle)} say how layers with a window differ, and model.window = 0 "
                "gives none",
                mend(*(f"model.{name}=0" for name in idle)),
            )
        return self

    @property
    def table_of_layer(self) -> dict[int, int]:
        """Return layer -> the value embedding that it mixes in; layers without one are left out."""
        tables, layers = self.value_embeddings, self.layers
        last = {layers - tables + table: table for table in range(tables)}
        return {**last, **{table: table for table in range(tables)}}

    @property
    def bigram_rows(self) -> int:
        """Return the rows of the table for pairs of tokens; 0 where there is none."""
        return self.bigram_multiple * self.vocab

    @property
    def reads_before(self) -> bool:
        """Return whether what the first block reads of a token is made of the one before it too."""
        return self.bigram_multiple > 0 or self.embedding_smear

    @property
    def gated(self) -> bool:
        """Return whether the MLP multiplies its hidden features by a gate."""
        return self.activation in ("swiglu", "geglu")

    @property
    def norms(self) -> int:
        """Return how many norms of the stream's features there are."""
        return (4 if self.post_norms else 2) * self.layers + 1

    @property
    def has_norm_weights(self) -> bool:
        """Return whether norms have learned weights."""
        return self.norm != "unit_rms_norm"

    @property
    def resolved_kv_heads(self) -> int:
        """Return the number of key and value heads: `kv_heads`, or `heads` where it is 0."""
        return self.kv_heads or self.heads

    @property
    def resolved_head_dim(self) -> int:
        """Return the features per head: `head_dim`, or `dim / heads` where it is 0."""
        return self.head_dim or self.dim // self.heads

    @property
    def resolved_ffn(self) -> int:
        """Return the hidden features of the MLP: `ffn`, or where it is 0 what `dim` gives."""
        if self.ffn:
            return self.ffn
        wide = 8 * self.dim / 3 if self.gated else 4 * self.dim
        return -(-int(wide) // 32) * 32
