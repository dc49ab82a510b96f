"""Define what renders a finding."""

from collections.abc import Callable
from typing import Any

from headrace.doctor.findings import Finding

Words = tuple[str, str, str]
"""The sentence, the evidence, and what was not measured."""
Describe = Callable[[Finding, Any], Words]
"""(finding, its facts) -> words."""
