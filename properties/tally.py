"""What a run of the property tests did, for the summary: examples, rejections, checks not exercised.

A tally belongs to one test; tallies are added up for the summary and survive a trip through JSON.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

SECTIONS = ("examples", "rejected", "not_exercised", "unsupported")


@dataclass
class Tally:
    """Counts by key: examples (provider, op), rejected (provider, op, reason), not_exercised (provider, op, what).

    `unsupported` (provider, op, feature) lists what the provider said it does not support; its counts mean nothing.
    """

    examples: Counter[tuple[str, ...]] = field(default_factory=Counter)
    rejected: Counter[tuple[str, ...]] = field(default_factory=Counter)
    not_exercised: Counter[tuple[str, ...]] = field(default_factory=Counter)
    unsupported: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        for name in SECTIONS:
            getattr(self, name).update(getattr(other, name))

    def to_json(self) -> dict[str, Any]:
        return {name: [[list(key), count] for key, count in getattr(self, name).items()] for name in SECTIONS}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Tally":
        return cls(**{name: Counter({tuple(key): count for key, count in data[name]}) for name in SECTIONS})

    def empty(self) -> bool:
        return not any(getattr(self, name) for name in SECTIONS)

    def idle(self) -> list[str]:
        """Providers of which nothing was checked, though something was asked for."""
        asked = {key[0] for name in SECTIONS for key in getattr(self, name)}
        return sorted(asked - {key[0] for key in self.examples})

    def lines(self, most: int = 12) -> list[str]:
        """The summary as text, per provider and op."""
        keys = sorted({key[:2] for name in SECTIONS for key in getattr(self, name)})
        lines = []
        for provider, op in keys:
            rejected = Counter({k[2]: n for k, n in self.rejected.items() if k[:2] == (provider, op)})
            count = self.examples[provider, op]
            lines.append(f"{provider}: {op}: {count} examples checked, {rejected.total()} drawn problems rejected")
            features = sorted(k[2] for k in self.unsupported if k[:2] == (provider, op))
            if features:
                lines.append(f"    not supported: {'; '.join(features)}")
            lines += _listed("rejected", rejected, most)
            missing = Counter({k[2]: n for k, n in self.not_exercised.items() if k[:2] == (provider, op)})
            lines += _listed("not exercised", missing, most)
        return lines


def _listed(title: str, counts: Counter[str], most: int) -> list[str]:
    lines = [f"    {title} {count} times: {what}" for what, count in counts.most_common(most)]
    if len(counts) > most:
        lines.append(f"    {title}: {len(counts) - most} more reasons")
    return lines
