"""Llama 2's tokenizer: a sentencepiece model."""

from pathlib import Path

from torchtitan.datasets.tokenizer.base import Tokenizer, TokenizerError, sha256

# Fields of sentencepiece's ModelProto (source: sentencepiece_model.proto).
PIECES, TRAINER_SPEC, NORMALIZER_SPEC = 1, 2, 3


class SentencePieceTokenizer(Tokenizer):
    def __init__(self, path: Path, content: bytes) -> None:
        import sentencepiece

        # The library accepts a file that ends between two pieces, as a smaller vocabulary.
        if not {PIECES, TRAINER_SPEC, NORMALIZER_SPEC} <= top_level_fields(content):
            raise TokenizerError(path, "the sentencepiece model is truncated or damaged", "fetch it again")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise TokenizerError(path, f"not a sentencepiece model ({error})", "fetch it again") from None
        self.vocab_size = self._processor.vocab_size()
        self.bos_id = self._processor.bos_id()
        self.eos_id = self._processor.eos_id()
        self.fingerprint = sha256(content)
        if self.bos_id < 0 or self.eos_id < 0:
            cause = f"it has no id for document begin or end (bos {self.bos_id}, eos {self.eos_id})"
            raise TokenizerError(path, cause, "train it with bos_id and eos_id, as Llama 2's is")

    def _encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


def top_level_fields(content: bytes) -> set[int]:
    """Field numbers of the outermost protobuf message; empty if the bytes are not whole fields of any length, which
    is all that a ModelProto holds."""
    fields, at = set(), 0
    while at < len(content):
        key, at = _varint(content, at)
        length, at = _varint(content, at)
        at += length
        if key & 7 != 2 or at > len(content):
            return set()
        fields.add(key >> 3)
    return fields


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A protobuf integer (7 bits a byte, low ones first) and the position after it, past the end if it is cut off."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(content):
            return 0, len(content) + 1
        value |= (content[at] & 0x7F) << shift
        at += 1
        if content[at - 1] < 0x80:
            break
    return value, at
