"""A plan asked for somewhere, as words: what it answers there, and what a remedy makes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from remedies import words_of

from headrace.assemble.context import check_supported, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import HeadraceError
from headrace.plan.plan import Plan
from headrace.plan.technique import Context

H200: dict[str, Any] = {
    "device": "cuda",
    "device_name": "NVIDIA H200",
    "capability": (9, 0),
    "has_triton": True,
    "has_compiler": True,
}
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"has_triton": True, "has_compiler": True},
    "bare cpu": {"has_triton": False, "has_compiler": False},
    "mps": {"device": "mps", "device_name": "mps"},
    "H200": H200,
    "bare H200": {**H200, "has_triton": False, "has_compiler": False},
    "old H200": {**H200, "torch": (2, 11)},
    "V100": {**H200, "device_name": "Tesla V100", "capability": (7, 0)},
    "A100": {**H200, "device_name": "NVIDIA A100", "capability": (8, 0)},
}
"""What a place has that differs from here."""
BASE = ("goal.steps=4", "device=cpu", "model.vocab=512", "schedule.steps=40")
MOVES = {
    "device=cuda": "H200",
    "an NVIDIA GPU": "H200",
    "an Ampere GPU or newer": "H200",
    "an Ampere GPU": "H200",
    "newer": "H200",
    "an Ada": "H200",
    "Hopper GPU": "H200",
    "device=cpu": "cpu",
    "Linux": "cpu",
    "pip install triton": "tools",
    "pip install triton on a GPU": "tools",
    "install g++": "tools",
    "clang++": "tools",
    "install g++ or clang++": "tools",
    "pip install -U torch": "tools",
    "pip install torch": "H200",
}
"""Words of a remedy that are no change of a plan, and the place that they lead to."""


@dataclass(frozen=True)
class Asked:
    """What is asked for, and where."""

    overrides: tuple[str, ...] = ()
    with_: tuple[str, ...] = ()
    place: str = "cpu"
    base: tuple[str, ...] = BASE

    def plan(self) -> Plan:
        """Return the plan, or a ConfigError."""
        return Plan.read("", catalogue(), overrides=[*self.base, *self.overrides], with_=self.with_)

    def context(self, plan: Plan) -> Context:
        """The place where it would run."""
        here = make_context(plan, torch.device("cpu"))
        there = PLACES[self.place]
        precision = plan.model.precision
        if precision == "auto":
            precision = "bf16" if there.get("device") == "cuda" else "fp32"
        return replace(here, **{"torch": (2, 13), **there, "precision": precision})

    def refusal(self) -> tuple[str, str]:
        """What it is told, and the remedy; nothing where it could run."""
        try:
            plan = self.plan()
            check_supported([*plan.techniques.values()], self.context(plan))
        except HeadraceError as error:
            return error.message, error.remedy.text
        return "", ""

    def answer(self) -> str:
        """What it is told; nothing where it could run."""
        return self.refusal()[0]

    def after(self, way: str, technique: str) -> Asked | None:
        """Change the question as one remedy says; return None where the remedy is prose."""
        if way in ("leave it out", "leave it"):
            return self._drop(technique)
        if way in MOVES:
            place = MOVES[way]
            if place == "tools":
                place = self.place.removeprefix("bare ").removeprefix("old ")
            return replace(self, place=place)
        if not (words := words_of(way)):
            return None
        found = self
        for number, word in enumerate(words):
            if word in ("--with", "--without"):
                continue
            before = words[number - 1] if number else ""
            if before == "--with":
                found = replace(found, with_=(*found.with_, word))
            elif before == "--without":
                found = found._drop(word)
            else:
                key = word.partition("=")[0]
                kept = (o for o in found.overrides if o.partition("=")[0] != key)
                found = replace(found, overrides=(*kept, word))
                if word in MOVES:
                    found = replace(found, place=MOVES[word])
        return found

    def _drop(self, name: str) -> Asked:
        kept = tuple(o for o in self.overrides if not o.startswith(f"techniques.{name}."))
        return replace(self, with_=tuple(n for n in self.with_ if n != name), overrides=kept)
