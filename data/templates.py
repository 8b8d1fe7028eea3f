"""Templates of generated text: how a fact is stated, and how the end of the text comes back to it."""

from __future__ import annotations

from dataclasses import dataclass

AGAIN = "\nSome of this again, in another order.\n\n"


@dataclass(frozen=True)
class Template:
    """How a fact is stated, and how the end comes back to it; ``{key}`` and ``{value}`` stand for what it is about.

    Attributes:
        head, tail: of the whole text. row: states the fact.
        ask, answer: of the end; by default the row comes again.
    """

    row: str
    head: str = ""
    tail: str = AGAIN
    ask: str = ""
    answer: str = ""

    def recall(self, key: str, value: str) -> tuple[str, str, str]:
        """The row, and what asks for it and answers."""
        texts = (self.row, self.ask, self.answer or self.row)
        row, ask, answer = (text.replace("{key}", key).replace("{value}", value) for text in texts)
        return row, ask, answer


# The first template of each kind is held out: it is never trained on.
LINES = (
    Template(
        "line {key}: REGISTER_CONTENT is <{value}>\n",
        head="Below is a record of lines. Each has a name and a number. Remember them.\n\n",
    ),
    Template(
        "entry {key} | code {value}\n",
        "Entries and their codes:\n\n",
        "\nSelected entries:\n",
        "entry {key} | code",
        " {value}\n",
    ),
    Template("{key} -> {value}\n", tail="\n", ask="{key} ->", answer=" {value}\n"),
    Template(
        "The box {key} holds {value}.\n",
        tail="\nWhat was in them?\n\n",
        ask="The box {key} holds",
        answer=" {value}.\n",
    ),
    Template("{key},{value}\n", "name,amount\n", "\n", "What is the amount of {key}? It is", " {value}.\n"),
)
KEY_VALUE = (
    Template('"{key}": "{value}",\n', head="Here is a JSON object.\n\n{\n", tail="}\n" + AGAIN),
    Template("{key}: {value}\n", "---\n", "---\n\n", "{key}:", " {value}\n"),
    Template('config["{key}"] = "{value}"\n', tail="\n", ask='assert config["{key}"] ==', answer=' "{value}"\n'),
    Template("<{key}>{value}</{key}>\n", "<data>\n", "</data>\n\n", "The value of {key} is", " {value}.\n"),
    Template("SET {key} {value}\nOK\n", tail="\n", ask="GET {key}\n", answer="{value}\n"),
)
NEEDLES = (
    Template("The special number of the {key} is {value}.\n\n"),
    Template(
        "By the way, the password of the {key} is {value}.\n\n",
        tail="\n",
        ask="The password of the {key} is",
        answer=" {value}.\n",
    ),
    Template(
        "(Room of the {key}: {value}.)\n\n", tail="\n", ask="Which room has the {key}? Room", answer=" {value}.\n"
    ),
    Template(
        "Remember that {value} belongs to the {key}.\n\n",
        tail="\n",
        ask="What belongs to the {key}? It is",
        answer=" {value}.\n",
    ),
)
FACTS = (  # of a chat: what the user says in passing, and what the assistant must know in the end
    Template(
        "user: The code of my {key} is {value}.\nassistant: I will remember it.\n",
        tail="\n",
        ask="user: What is the code of my {key}?\nassistant: The code of your {key} is",
        answer=" {value}.\n",
    ),
    Template(
        "user: I paid {value} for the {key}.\nassistant: Thank you for telling me.\n",
        tail="\n",
        ask="user: How much was the {key}?\nassistant: You paid",
        answer=" {value} for the {key}.\n",
    ),
    Template(
        "user: Please note: {key}, number {value}.\nassistant: Noted.\n",
        tail="\n",
        ask="user: And the number of the {key}?\nassistant: It is number",
        answer=" {value}.\n",
    ),
    Template(
        "user: My friend calls {value} her {key}.\nassistant: How nice.\n",
        tail="\n",
        ask="user: What does my friend call her {key}?\nassistant: She calls it",
        answer=" {value}.\n",
    ),
)
