"""Llama 2's tokenizer: a sentencepiece model."""

from pathlib import Path

from torchtitan.datasets.tokenizer.base import Tokenizer, TokenizerError, sha256


class SentencePieceTokenizer(Tokenizer):
    def __init__(self, path: Path, content: bytes) -> None:
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, UnicodeDecodeError):  # the second from quoting a damaged piece
            cause = "not a sentencepiece model, or a truncated or damaged one"
            raise TokenizerError(path, cause, "fetch it again") from None
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
