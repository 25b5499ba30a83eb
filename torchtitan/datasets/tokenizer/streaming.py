"""The text of tokens that come one by one, in pieces of whole characters; the work for a token does not grow."""

from collections.abc import Iterable, Iterator, Sequence

from torchtitan.datasets.tokenizer.base import Tokenizer

PENDING = "\ufffd"
"""What bytes that are no character, or not yet, decode to."""
MOST_PENDING = 3
"""Of a character's bytes, as many as may wait for the last one; some tokenizers show each."""
LOOK_BACK = 8
"""Tokens before the new one that are decoded along: what it becomes may depend on them (a blank that begins a text is
left out, say), and the bytes of a character are among them."""


def text_of(tokens: Iterable[int], prompt: Sequence[int], tokenizer: Tokenizer) -> Iterator[str]:
    """What the tokens add to the prompt's text. Put together, the pieces are the text of all ids less the prompt's;
    bytes of a character that has not become whole at the end are left out.
    """
    window = list(prompt[-LOOK_BACK:])
    shown = len(tokenizer.decode(window))
    for token in tokens:
        window.append(token)
        text = tokenizer.decode(window)
        waiting = min(MOST_PENDING, len(text) - len(text.rstrip(PENDING)))
        settled = len(text) - waiting
        if settled > shown:
            yield text[shown:settled]
            shown = settled
        if len(window) > LOOK_BACK:
            window = window[-LOOK_BACK:]
            shown += len(tokenizer.decode(window)) - len(text)
