"""Llama 2's tokenizer, T5's and others: a sentencepiece model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.datasets.tokenizer import hf_export
from torchtitan.datasets.tokenizer.base import Range, Tokenizer, TokenizerError, sha256


class SentencePieceTokenizer(Tokenizer):
    def __init__(self, path: Path, content: bytes) -> None:
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, UnicodeDecodeError):  # UnicodeDecodeError if it quotes a damaged piece
            cause = "not a sentencepiece model, or a truncated or damaged one"
            raise TokenizerError(path, cause, "fetch it again") from None
        self._path = path
        self.vocab_size = self._processor.vocab_size()
        bos_id = self._processor.bos_id()
        self.bos_id = None if bos_id < 0 else bos_id
        self.eos_id = self._processor.eos_id()
        name, is_control = self._processor.id_to_piece, self._processor.is_control
        self.special_tokens = {name(i): i for i in range(self.vocab_size) if is_control(i)}
        self.fingerprint = sha256(content)
        if self.eos_id < 0:
            cause = f"it has no id for a document's end (eos {self.eos_id})"
            raise TokenizerError(path, cause, "train it with eos_id, as Llama 2's and T5's are")

    def as_hf_files(self) -> dict[str, bytes]:
        """Return the files: tokenizer.json, its configuration, and the model itself, which llama.cpp reads."""
        name = self._processor.id_to_piece
        bos = None if self.bos_id is None else name(self.bos_id)
        tokens = self._pieces()
        try:
            converted = hf_export.pieces(tokens, {tokens.unknown: self._processor.unk_id(), **self.special_tokens}, bos)
        except JobError as error:
            raise TokenizerError(
                self._path, str(error), "give the model's own, or leave out checkpoint.last_save_in_hf"
            ) from None
        files = hf_export.tokenizer_files(converted, bos, name(self.eos_id), unknown=tokens.unknown)
        return files | {"tokenizer.model": self._processor.serialized_model_proto()}

    def _pieces(self) -> hf_export.Pieces:
        trainer: dict[int, Any] = {}
        normalizer: dict[int, Any] = {}
        for number, value in _fields(self._processor.serialized_model_proto()):
            if number in (2, 3) and isinstance(value, bytes):
                (trainer if number == 2 else normalizer).update(_fields(value))
        processor = self._processor
        ids = {processor.id_to_piece(i): i for i in range(self.vocab_size)}
        no_text = (processor.is_control, processor.is_unknown, processor.is_unused, processor.is_byte)
        scored = {piece: i for piece, i in ids.items() if not any(is_such(i) for is_such in no_text)}
        return hf_export.Pieces(
            kind=trainer.get(3, hf_export.UNIGRAM),
            ids=ids,
            scores={piece: processor.get_score(i) for piece, i in scored.items()},
            unknown=processor.id_to_piece(processor.unk_id()),
            byte_fallback=bool(trainer.get(35, 0)),
            suffixed=bool(trainer.get(24, 0)),
            charsmap=normalizer.get(2, b""),
            prefixed=bool(normalizer.get(3, 1)),
            remove_extra_blanks=bool(normalizer.get(4, 1)),
        )

    def has_token(self, name: str) -> bool:
        return bool(self._processor.id_to_piece(self._processor.piece_to_id(name)) == name)

    def _encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def _offsets(self, text: str, ids: list[int]) -> list[Range]:
        """Return the offsets in SentencePieceText (field 2: pieces; their fields 4 and 5: begin and end, in bytes). It
        gives a range only to the last piece of a character's bytes; here all of them get it."""
        character_of = [number for number, letter in enumerate(text) for _ in letter.encode()] + [len(text)]
        message = self._processor.encode(text, out_type="serialized_proto")
        pieces = [
            dict(_fields(value)) for number, value in _fields(message) if number == 2 and isinstance(value, bytes)
        ]
        offsets: list[Range] = []
        following = len(text)
        for piece in reversed(pieces):
            begin, end = (character_of[int(piece.get(number, 0))] for number in (4, 5))
            following = end if end > begin else following
            offsets.append((begin, following))
        return offsets[::-1]

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field of a protocol buffer that sentencepiece has already read.

    Numbers as in sentencepiece_model.proto: 2 trainer (3 kind, 24 blanks as suffixes, 35 byte fallback), 3 normalizer
    (2 charsmap, 3 dummy prefix, 4 remove extra whitespace).
    """
    place = 0

    def number() -> int:
        nonlocal place
        value, shift = 0, 0
        while True:
            byte = message[place]
            value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
            if byte < 128:
                return value

    while place < len(message):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or number()
            yield key >> 3, message[place : place + size]
            place += size
