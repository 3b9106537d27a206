"""Keep a context in a running pool, then put questions to it: one answer written out, one choice among labels.

    geist-pool                        # in one terminal
    python examples/ask.py            # in another

Of another pool than the one named "default": set GEIST_POOL_ADDRESS.
"""

from geist_pool.client import Client

TAVERN = """\
The Second Ferry is an inn on the wrong bank of the river Amble. Hesper Dunn keeps it; Odo Pask, the ferryman, owes her for
forty pints and cannot swim. Tonight the river is over the third step, the window by the stairs is broken, and the glazier
lives on the far bank.
"""


def main() -> None:
    with Client() as pool:
        made = pool.create_context(TAVERN, name="tavern")
        print(f"context {made.context.id}: {made.context.n_tokens} tokens, {'created' if made.created else 'was there already'}")

        with pool.stream('\n"Will you fetch the glazier?" asks Hesper. "', context="tavern", max_tokens=40, stop=['"']) as answer:
            for chunk in answer:
                print(chunk.text, end="", flush=True)
            usage = answer.result().usage
        print(f"\n  reused {usage.reused}, prefilled {usage.prefilled}, generated {usage.generated} tokens")

        labels = [" go out to the ferry", " sit down again", " swim to the far bank"]
        choice = pool.score("\nWhat Odo does next is", labels, context="tavern")
        for label, score in zip(labels, choice.labels, strict=True):
            print(f"  {score.sum:9.3f}  {label}")
        print(f"  best: {labels[choice.best]!r} by sum, {labels[choice.best_mean]!r} by mean")


if __name__ == "__main__":
    main()
