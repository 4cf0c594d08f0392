"""How much the property tests do: set by the plugin before the test modules are imported. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Profile:
    """`scale` multiplies every test's number of examples; `home` is for Hypothesis's files (None: its own choice)."""

    name: str
    scale: float
    shrink: bool = True
    home: Path | None = None

    def examples(self, count: int) -> int:
        return max(1, round(count * self.scale))


PROFILES = {
    "quick": Profile("quick", 0.25, shrink=False),
    "default": Profile("default", 1.0),
    "deep": Profile("deep", 20.0),
}

active = PROFILES["default"]


def activate(profile: Profile) -> None:
    """Make `profile` the one that test modules imported from now on use."""
    global active
    active = profile
