"""A conversation, and sentences that are told apart by a name."""

from __future__ import annotations

CHAT = [
    {"role": "user", "content": "What stands in the second paragraph of this letter?\n\nDear all, hello."},
    {"role": "assistant", "content": "A greeting: dear all, hello."},
]


def sentences(name: str, count: int) -> list[str]:
    return [f"{name} record {i} " + " ".join(f"{name}{i}word{j}" for j in range(12)) for i in range(count)]
