"""Learn which of two answers is preferred, from pairs.

A pair is two conversations that begin alike and end in a chosen and a rejected answer. Rows hold
whole pairs (data/packing/pairs), so one forward pass gives the log-probabilities of both answers
under a document mask, and the loss is a function of these sums (model/preference_loss): DPO, IPO,
SimPO or ORPO. The step's loss is the mean over its pairs, whatever micro-batches and ranks they
lie on.

DPO and IPO read a reference: how likely the answers were before training. With adapters it is the
frozen model with its adapters switched off, one more forward pass a step and no second copy of any
weight. Otherwise every answer's log-probability is computed once before the first step and kept
beside the shards under a name made of the weights and the shards; a resume reads it again, and what
was interrupted goes on.

A validation counts the chosen answers, and compares the held-out pairs: the share that is ranked
right by rewards, how far these are apart, their mean loss, and the share whose chosen answer is the
likelier one by the model alone, which says something before training too, when no reward is.

The loss of a pair is no sum over tokens, and the head that holds all logits gives it all tokens of
a micro-batch at once. A head that makes logits in chunks is given the slope of the loss for each
token instead, found in one more forward pass: of a function of sums, the gradient is that of the
sums times these slopes, so it is the same gradient.

Left out: a reference that is a second model, sums that follow the policy (TR-DPO), and pairs cut to
a row. Shapes: N tokens, V vocabulary entries.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from headrace.assemble.documents import with_document_mask
from headrace.assemble.references import References, is_inside, shared, validation_rows
from headrace.assemble.sockets import Build, MicroBatch
from headrace.core.errors import RefusalKind
from headrace.core.remedy import leave_out, mend
from headrace.core.strict import Wrong
from headrace.costs.ledger import Ledger
from headrace.data.packing.pairs import PairRows
from headrace.model.head import IGNORED, Head, Vocabulary
from headrace.model.lora import without_adapters
from headrace.model.preference_loss import BETAS, Answers, LossName, PairLosses, PreferenceLoss
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

MEASURED = ("pairs", "chosen_likelier", "ranked_right", "reward_margin", "pair_loss")
"""What a validation says of held-out pairs: their number, and means over them."""


def log_probabilities(logits_NV: Tensor, targets_N: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the log-probability of each token's target in nats, [N]; 0 where none counts."""
    counted_N = targets_N != IGNORED
    picked_N = vocabulary.pick(logits_NV, targets_N.where(counted_N, 0))
    return (picked_N - vocabulary.logsumexp(logits_NV)).where(counted_N, 0.0)


class Comparing:
    """Compare the answers of a step's pairs, and add up what came of it.

    Args:
        build: the run.
        loss: of a pair.
        references: finds what the loss compares with; None where it needs nothing.
    """

    def __init__(self, build: Build, loss: PreferenceLoss, references: References | None) -> None:
        self.loss, self.references = loss, references
        self.length = build.plan.data.sequence_length
        zeros = torch.zeros(build.plan.micro_rows * self.length, device=build.device)
        self.sums = zeros
        """Log-probabilities by document, of the micro-batch that is read ahead of its step."""
        self.factor = torch.ones((), device=build.device)
        """Targets for each pair of the step: its loss is divided by targets afterwards."""
        self.counts = torch.zeros(3, device=build.device)
        """Pairs of this rank in the newest step, those ranked right, and their summed margin."""
        self.in_chunks = False
        """Whether the head makes logits of some tokens at a time."""
        self.looks = 0
        self.validation_pairs: PairRows | None = None
        self.has_looked = False
        """Whether held-out pairs were looked for."""

    def enrich(self, build: Build, works: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return micro-batches with what the objective needs to know of their documents."""
        self.in_chunks = type(build.model.head) is not Head
        self.counts.zero_()
        made = [self._numbered(work) for work in works]
        if self.references is not None:
            self.references.make(build, self.read)
            self.looks += len(made) * (self.references.kept is None)
            made = [self._referred(build, work) for work in made]
        sizes = torch.stack([torch.stack(self._sizes(work)) for work in made]).sum(0)
        pairs, targets = build.world.sum_(sizes, "shard")
        self.factor.copy_(targets / pairs.clamp(min=1))
        return [self._sloped(build, work) for work in made] if self.in_chunks else made

    def _numbered(self, work: MicroBatch) -> MicroBatch:
        """Return a micro-batch with the document of each token, and the targets of each document.

        Document d of row b has the number b T + d, so that all have a place in [N].
        """
        B, T = work.ids_BT.shape
        segments_BT = work.rows.segments_BT
        assert segments_BT is not None, "the mask keeps documents apart"
        rows_B1 = torch.arange(B, device=work.ids_BT.device)[:, None]
        document_N = (rows_B1 * T + segments_BT).reshape(-1)
        counted_N = (work.targets_BT.reshape(-1) != IGNORED).float()
        tokens_N = torch.zeros_like(counted_N).index_add_(0, document_N, counted_N)
        extras = {**(work.extras or {}), "document": document_N, "tokens": tokens_N}
        return work._replace(extras={**extras, "reference": torch.zeros_like(tokens_N)})

    def _referred(self, build: Build, work: MicroBatch) -> MicroBatch:
        """Return a micro-batch with the reference's log-probability of each document."""
        assert work.extras is not None and self.references is not None
        kept_N = self.references.of(work)
        if kept_N is None:
            kept_N = self.read(build, work, without_adapters(build.model))
        return work._replace(extras={**work.extras, "reference": kept_N})

    @torch.no_grad()
    def read(
        self, build: Build, work: MicroBatch, how: AbstractContextManager[Any] | None = None
    ) -> Tensor:
        """Return the log-probability of each document's answers, [N], by the model as it is."""
        if work.extras is None or "document" not in work.extras:
            work = self._numbered(work)
        self.sums.zero_()
        with how or nullcontext():
            build.engine(build, [work], self._add_up, torch.ones((), device=build.device))
        return self.sums[: work.ids_BT.numel()].clone()

    def _add_up(
        self, logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Vocabulary
    ) -> Tensor:
        """Add each token's log-probability to its document; an objective."""
        log_N = log_probabilities(logits_NV, targets_N, vocabulary)
        self.sums.index_add_(0, extras["document"], log_N)
        return -log_N.sum()

    def _sizes(self, work: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the pairs and the targets of a micro-batch."""
        assert work.extras is not None
        tokens_N = work.extras["tokens"]
        return self._valid(tokens_N).sum().float(), tokens_N.sum()

    def _sides(self, values_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of documents 2j and of documents 2j + 1 of each row, [P] each."""
        values_BT = values_N.view(-1, self.length)
        even = 2 * (self.length // 2)
        return values_BT[:, 0:even:2].reshape(-1), values_BT[:, 1:even:2].reshape(-1)

    def _valid(self, tokens_N: Tensor) -> Tensor:
        """Return which pairs are there, bool [P]: others are empty places of a row."""
        chosen, rejected = self._sides(tokens_N)
        return (chosen > 0) & (rejected > 0)

    def compare(self, sums_N: Tensor, extras: Any) -> Tensor:
        """Return the summed loss of a micro-batch's pairs, from its documents' sums.

        Times the factor it is divided by targets later, which gives the mean over pairs.
        """
        compared, valid, _ = self._compared(sums_N, extras)
        self._note(compared, valid)
        return compared.loss.where(valid, 0.0).sum() * self.factor

    def _compared(self, sums_N: Tensor, extras: Any) -> tuple[PairLosses, Tensor, Tensor]:
        """Return what the loss says of a micro-batch's pairs, and two bool [P].

        These are which pairs are there, and whose chosen answer is likelier than the rejected one.
        """
        valid = self._valid(extras["tokens"])
        sums, tokens, before = (
            self._sides(values_N) for values_N in (sums_N, extras["tokens"], extras["reference"])
        )
        # An empty place is given an answer of one token, so that no loss is infinite there.
        chosen, rejected = (
            Answers(
                sums[side].where(valid, -1.0),
                tokens[side].clamp(min=1),
                before[side].where(valid, -1.0),
            )
            for side in (0, 1)
        )
        likelier = chosen.log_probability > rejected.log_probability
        return self.loss(chosen, rejected), valid, likelier & valid

    @torch.no_grad()
    def _note(self, compared: PairLosses, valid: Tensor) -> None:
        """Add up how far the rewards of pairs are apart, and how many are ranked right."""
        margin = (compared.chosen_reward - compared.rejected_reward).where(valid, 0.0)
        self.counts.add_(torch.stack([valid.sum(), (margin > 0).sum(), margin.sum()]).float())

    def objective(
        self, logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Vocabulary
    ) -> Tensor:
        """Return the summed loss of pairs; of a chunk of tokens, by the slopes of its tokens."""
        log_N = log_probabilities(logits_NV, targets_N, vocabulary)
        if self.in_chunks:
            return (extras["slope"] * log_N + extras["offset"]).sum()
        sums_N = torch.zeros_like(log_N).index_add(0, extras["document"], log_N)
        return self.compare(sums_N, extras)

    def _sloped(self, build: Build, work: MicroBatch) -> MicroBatch:
        """Return a micro-batch with the slope of its loss for each token, and what it leaves out.

        At the weights as they are, slope x log-probability + offset sums up to the loss, and the
        gradient is its gradient.
        """
        assert work.extras is not None
        sums_N = self.read(build, work).requires_grad_()
        with torch.enable_grad():
            total = self.compare(sums_N, work.extras)
            (slopes_N,) = torch.autograd.grad(total, sums_N)
        offset = total.detach() - (slopes_N * sums_N.detach()).sum()
        offset_N = torch.zeros_like(slopes_N)
        offset_N[0] = offset
        extras = {
            "slope": slopes_N[work.extras["document"]],
            "offset": offset_N,
        }
        return work._replace(extras={**work.extras, **extras})

    def begin(self, build: Build) -> None:
        """Read the reference before the first step, where it is not inside of the model."""
        if self.references is not None:
            self.references.make(build, self.read)

    @torch.no_grad()
    def evaluate(self, build: Build, tokens: int | None) -> dict[str, float]:
        """Return how the held-out pairs are ranked, over all ranks; nothing where there are none.

        Of a run that is only read, whose reference is not inside of the model, it is known which
        answers are likelier and no more.

        Args:
            build: the run.
            tokens: the most tokens, in rows spread evenly over the held-out pairs; None for all.
        """
        if not self.has_looked:
            self.has_looked, self.validation_pairs = True, validation_rows(build)
            if self.validation_pairs is None:
                build.note_line(
                    "no held-out pair fits a row: how many are ranked right is not measured"
                )
        if (packer := self.validation_pairs) is None:
            return {}
        rows = packer.units[0]
        count = rows if tokens is None else max(1, min(rows, tokens // self.length))
        chosen = [(0, number * rows // count) for number in range(count)]
        references = self.references
        is_known = references is None or references.kept is not None or is_inside(build)
        sums = torch.zeros(5, device=build.device)
        for _, placed in shared(build, packer, chosen):
            work = self._numbered(placed)
            if self.references is not None and is_known:
                work = self._referred(build, work)
            assert work.extras is not None
            compared, valid, likelier = self._compared(self.read(build, work), work.extras)
            apart = (compared.chosen_reward - compared.rejected_reward).where(valid, 0.0)
            loss = compared.loss.where(valid, 0.0)
            of_pairs = valid, likelier, apart > 0, apart, loss
            sums += torch.stack([one.sum().float() for one in of_pairs])
        pairs, *rest = build.world.sum_(sums, "shard").tolist()
        means = [one / pairs for one in rest[: None if is_known else 1]]
        return dict(zip(MEASURED, [pairs, *means], strict=False))

    def margin(self, build: Build) -> Tensor:
        """Return how far rewards are apart, a mean over the newest step's pairs."""
        pairs, _, margin = build.world.sum_(self.counts.clone(), "shard")
        return margin / pairs.clamp(min=1)

    def right(self, build: Build) -> Tensor:
        """Return the share of the newest step's pairs whose chosen answer has the larger reward."""
        pairs, right, _ = build.world.sum_(self.counts.clone(), "shard")
        return right / pairs.clamp(min=1)


class Preference(Technique[Build]):
    """Learn which of two answers is preferred, from pairs."""

    loss: LossName = "dpo"
    """`dpo` and `ipo` compare with a reference; `simpo` and `orpo` have none."""
    beta: float | None = Field(default=None, gt=0, le=100)
    """Strength of the preference. Left open: 0.1, and 2 for `simpo`; tuner range 0.01 to 10."""
    gamma: float | None = Field(default=None, ge=0, le=100)
    """How far rewards are to be apart, for `simpo` alone. Left open: half of `beta`, the middle of
    the paper's range."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of the pairs whose answers are taken to be the wrong way round, for `dpo` and `simpo`.
    """

    room: ClassVar[str] = "adapt"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("pack",)
    composes: ClassVar[tuple[str, ...]] = (
        "mask",
        "enrich",
        "objective",
        "measured",
        "evaluates",
        "begins",
        "state",
    )
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="answers that people prefer, from pairs alone: no reward model and no sampling",
        costs="with a reference and adapters, one more forward pass a step (derived)",
        helps="a model that was fine-tuned on conversations before, and pairs of its own answers",
        hurts="many passes over few pairs: both answers grow unlikely (arXiv 2402.13228)",
        source="arXiv 2305.18290; arXiv 2310.12036; arXiv 2405.14734; arXiv 2403.07691",
    )

    @model_validator(mode="after")
    def _check_knobs(self) -> Self:
        """Refuse knobs that the loss does not read."""
        if self.gamma is not None and self.loss != "simpo":
            raise Wrong(
                f"gamma = {self.gamma:g} is a margin of simpo's, and loss = {self.loss!r} has none",
                leave_out("techniques.preference.gamma"),
            )
        if self.label_smoothing and self.loss not in ("dpo", "simpo"):
            raise Wrong(
                f"label_smoothing = {self.label_smoothing:g} is read by dpo and simpo, and loss = "
                f"{self.loss!r} has none",
                mend("techniques.preference.label_smoothing=0"),
            )
        return self

    def made_loss(self) -> PreferenceLoss:
        """Return the loss of a pair."""
        beta = BETAS[self.loss] if self.beta is None else self.beta
        gamma = 0.0
        if self.loss == "simpo":
            gamma = beta / 2 if self.gamma is None else self.gamma
        return PreferenceLoss(self.loss, beta, gamma, self.label_smoothing)

    def supports(self, context: Context) -> Supported | Unsupported:
        """Run on preference pairs, whole on each rank, in rows that nothing cuts again."""
        if (plan := context.plan) is None:
            return Supported()
        if plan.data.chat is None or plan.data.chat.kind != "preference":
            kind = "not set" if plan.data.chat is None else f"{plan.data.chat.kind!r}"
            return Unsupported(
                f"it compares the answers of pairs, and data.chat.kind is {kind}",
                mend("data.chat.kind=preference"),
                RefusalKind.PLAN,
            )
        for axis in ("tensor", "context", "pipeline"):
            if getattr(plan.mesh, axis) > 1:
                return Unsupported(
                    f"it compares whole answers on each rank, and mesh.{axis} gives a rank a part",
                    context.whole(axis),
                    RefusalKind.COMBINATION,
                )
        for name, other in plan.techniques.items():
            if "recut" in other.composes:
                return Unsupported(
                    f"both answers of a pair stand in one row, and {name} cuts rows anew",
                    mend(f"-{name}"),
                    RefusalKind.COMBINATION,
                )
            own = {"objective", "passes"} & {*other.composes, *other.claims}
            if own and name not in (self.name(), "z_loss"):
                return Unsupported(
                    f"its loss is of pairs, and {name} has another",
                    mend(f"-{name}"),
                    RefusalKind.COMBINATION,
                )
        noisy = next((name for name, other in plan.techniques.items() if other.is_noisy()), "")
        heads = [name for name, other in plan.techniques.items() if "parts.head" in other.claims]
        if noisy and heads:
            return Unsupported(
                f"{heads[0]} makes the logits of some tokens at a time, and needs the slopes of "
                f"whole answers from a pass without gradients, in which {noisy} does nothing",
                mend(f"-{heads[0]}") | mend(f"-{noisy}"),
                RefusalKind.COMBINATION,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Add the mask, and the forward pass of a reference that is computed in every step."""
        ledger = with_document_mask(ledger)
        if self.made_loss().has_reference:
            ledger = ledger.with_flops("reference", ledger.flops["forward"])
        return ledger

    def apply(self, build: Build) -> None:
        """Pack pairs into rows, keep documents apart, and compare the answers of each pair."""
        loss = self.made_loss()
        references = References(self.name()) if loss.has_reference else None
        comparing = build.notes[self.name()] = Comparing(build, loss, references)
        build.mask = build.mask.with_document()
        build.pack = _pack
        build.enrich.append(comparing.enrich)
        build.objective = comparing.objective
        build.measured |= {"reward_margin": comparing.margin, "ranked_right": comparing.right}
        build.evaluates.append(comparing.evaluate)
        if references is not None:
            build.begins.append(comparing.begin)
            build.state[self.name()] = references

    def active(self, build: Build) -> Evidence:
        """Report the pairs of the newest step, and what their reference was."""
        comparing, packer = build.notes[self.name()], build.loader.packer
        if not isinstance(packer, PairRows):
            return Evidence(False, "another packer makes the rows")
        pairs, right, margin = comparing.counts.tolist()
        references, tokens = comparing.references, "no reference"
        is_read = True
        if references is not None:
            is_read = references.kept is not None or comparing.looks > 0
            tokens = "the weights as they were before training, read once"
            if references.kept is None:
                tokens = f"the model without its adapters, {comparing.looks} times"
        share = right / max(1.0, pairs)
        numbers = {
            "pairs": pairs,
            "ranked_right": share,
            "reward_margin": margin / max(1.0, pairs),
            "pairs_of_an_epoch": float(packer.pairs),
            "pairs_too_long": float(packer.too_long),
        }
        return Evidence(
            active=pairs > 0 and is_read and build.loader.segments,
            detail=f"{share:.0%} of {pairs:.0f} pairs ranked right, rewards "
            f"{numbers['reward_margin']:.3g} apart; reference: {tokens}",
            numbers=numbers,
        )


def _pack(build: Build, shards: Sequence[Any]) -> PairRows:
    """Return rows of pairs, and say how many pairs are in none."""
    packer = PairRows(shards, build.plan.data.sequence_length)
    for line in packer.lines():
        build.note_line(line)
    return packer
