"""What a request's text and token ids must be before they reach a tokenizer or a model."""

from collections.abc import Iterable

from omlx.errors import BadRequest


def check_text(text: str, param: str) -> None:
    """Raises BadRequest for half of a surrogate pair, which no UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise BadRequest(
            f"{param} has an unpaired surrogate ({half}) at character {error.start}; send whole characters",
            param=param,
        ) from error


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raises BadRequest for a token id that the model has no row for."""
    for id in ids:
        if not 0 <= id < vocab_size:
            raise BadRequest(
                f"{param}: token id {id} is outside the vocabulary (0 to {vocab_size - 1})", param=param
            )
