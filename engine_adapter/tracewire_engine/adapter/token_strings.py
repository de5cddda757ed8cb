"""The strings of tokens, one for each id, as a table of tokens shows them."""

from __future__ import annotations

from typing import Any

__all__ = ["TokenStrings"]

#: The character for a space in the vocabularies of SentencePiece.
_SPACE = "\u2581"


class TokenStrings:
    """Finds the string of each token id, and caches it: at most one string for each id of the vocabulary.

    A string has the token's leading space, which `decode` drops at the beginning of a text with some tokenizers.
    Special tokens have their names. Where a character is spread over several tokens, each has the replacement character
    for its part, so that strings put together are not always the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token_ids: list[int]) -> list[str]:
        """The strings of these tokens, in their order."""
        known = self._known
        try:
            return [known[token_id] for token_id in token_ids]
        except KeyError:
            for token_id in set(token_ids) - known.keys():
                known[token_id] = self._string(token_id)
            return [known[token_id] for token_id in token_ids]

    def _string(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        (piece,) = self._tokenizer.convert_ids_to_tokens([token_id])
        if isinstance(piece, str) and piece.startswith(_SPACE) and not text.startswith(" "):
            return " " + text
        return text
