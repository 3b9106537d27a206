"""The demo's world: an inn, the people in it, the evening so far, and questions to put to them.

One constant context of about 700 tokens (SmolLM2) and many short questions: the workload the pool is for.
The same prose is offered as plain text (`CONTEXT_TEXT`) and as chat messages (`CONTEXT_MESSAGES`).

It is a Python module and not a data file because the questions are typed values of two kinds: a type
checker sees them here, while a TOML or JSON file would need a reader, and a set of errors, for text that
never changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Say:
    """A question that is answered by generating: the character speaks until the closing quotation mark."""

    character: str
    suffix: str
    """Text that follows the context; starts with a newline and ends inside an opened quotation."""
    max_tokens: int = 32
    stop: tuple[str, ...] = ('"', "\n")


@dataclass(frozen=True, slots=True)
class Choose:
    """A question that is answered by scoring: which of the labels continues the text best."""

    character: str
    suffix: str
    """Text that follows the context; starts with a newline and ends without a space."""
    labels: tuple[str, ...]
    """Whole continuations of several tokens, each starting with a space. No label begins another."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message of the context."""

    role: str
    content: str


Question = Say | Choose


def _unwrap(text: str) -> str:
    """Join the lines of each paragraph; paragraphs stay apart by one empty line."""
    return "\n\n".join(" ".join(p.split()) for p in text.strip().split("\n\n"))


CONTEXT_NAME: Final = "second-ferry"

PLACE: Final = _unwrap("""
The Second Ferry is an inn on the wrong bank of the river Amble. There is no second ferry, and there was no
first one worth the name until Odo Pask built it out of his late mother-in-law's barn. The inn has eleven
windows, on which the crown charges a tax, and a twelfth behind the coal, which nobody has mentioned to the
crown.

Hesper Dunn keeps the inn. She bought it from a man who wept as he signed, and only understood a year later
that he had been happy. She waters the beer according to a private scale of justice.

Odo Pask, the ferryman, cannot swim. Learning to, he says, would look like a lack of confidence. He owes
Hesper for forty pints and pays in free crossings, though she has never wanted to go anywhere.

Wilmot Tarn assesses taxes. He came for one night to count the windows, and the flood has kept him for nine.
He is a kind man in a trade that has no use for it, and he has begun to round down.

Nip, Hesper's niece, is eleven years old and takes bets. She has made money on two engagements and the
length of a funeral.

Brother Ansel is under a vow of silence, feast days excepted. This is his fourth feast day this week.

The goose is called the Magistrate: it has never changed its mind.
""")

EVENING: Final = _unwrap("""
Tonight the rain comes in under the door like one of the regulars. An hour ago the window by the stairs
broke.

"The glass is all out in the yard," said Wilmot from the door. "So the stone was thrown from in here. I say
it with regret, since I like nearly all of you."

"Ten windows, then," said Hesper. "Write that down. Ten is cheaper than eleven."

Wilmot wrote it down.

"It was the goose," said Odo. "I saw it look at the stone."

"The Magistrate was in the kitchen with me," said Nip. "It had twopence on the rain."

Brother Ansel observed that this was the feast of Saint Orrin, who watches over glaziers, and that he had
only been holding the stone to warm it when a moth came at him. Then he remembered that Saint Orrin is kept
in March, and put his hand over his mouth.

Hesper took away his mug and brought him another, in which the beer was so thin that he could have read his
psalter through it.

"You'll fetch the glazier," she told Odo. "He's on the far bank."

"River's over the third step. I don't cross over the third step."

"You crossed at the fourth for a cheese."

"That," said Odo, "was a very good cheese."

Nip licked her pencil and offered three to one against the crossing. Wilmot, after a struggle that the whole
room could follow, laid a silver sixpence on Odo. Odo looked at the coin for some time. Nobody had ever put
money on him before. He finished his pint, asked Hesper whether forty might become thirty, and reached for
his hat; and the Magistrate, whom no one had consulted, got down off the bench and went to stand by the
door.
""")

CONTEXT_TEXT: Final = PLACE + "\n\n" + EVENING
"""The whole context as plain text."""

CONTEXT_MESSAGES: Final = (Message("system", PLACE), Message("user", EVENING))
"""The same prose as a chat: the place and its people are the system message, the evening is the user's."""

QUESTIONS: Final[tuple[Question, ...]] = (
    Say("Nip", '\n\nAsked who broke the window by the stairs, Nip says: "It was'),
    Choose(
        "Brother Ansel",
        "\n\nBrother Ansel's state of mind is best described as",
        (" ashamed of himself", " proud of his aim", " quietly furious with Hesper", " bored and hungry"),
    ),
    Say("Hesper", '\n\n"Thirty pints," said Hesper to Odo, "if'),
    Choose(
        "Odo",
        "\n\nWhat Odo does next is",
        (" go out to the ferry", " sit down again", " order another pint", " swim to the far bank"),
    ),
    Say("Wilmot", '\n\nAsked why he has put his money on Odo, Wilmot says: "Because he'),
    Choose(
        "Wilmot",
        "\n\nIf somebody told Wilmot about the window behind the coal, he would",
        (" look the other way", " write it down", " raise the tax", " arrest Hesper"),
    ),
    Say("Odo", '\n\nAt the door Odo turns to Hesper. "If I am not back by morning,'),
    Choose(
        "Nip",
        "\n\nIf Odo comes back with the glazier, Nip will",
        (" pay Wilmot his winnings", " keep the sixpence", " hide in the kitchen", " blame the goose"),
    ),
    Say("Brother Ansel", '\n\n"Forgive me," whispered Brother Ansel to Hesper. "I was only holding'),
    Choose(
        "the Magistrate",
        "\n\nThe goose stands by the door because it means to",
        (" cross the river with Odo", " keep Odo from leaving", " get out of the rain", " bite the taxman"),
    ),
)
