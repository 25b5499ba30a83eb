"""Train the three small vocabularies of tests/assets/tokenizer on `python_stdlib`.

Each has 2048 ids in all, for the debug model. The result is a function of the library's text, which differs a little
between Python versions, and of the trainers' versions; the files in the repository were made on Python 3.11 with the
pins of constraints.txt. Prints the bytes per token on `python_stdlib_validation`.

Usage: python scripts/train_tokenizers.py [folder]
"""

import base64
import io
import json
import os
import sys
from pathlib import Path

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan.datasets import DATASETS
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.datasets.tokenizer.byte_level import NUM_SPECIAL, PATTERN

VOCAB_SIZE = 2048
FOLDER = Path(__file__).parents[1] / "tests/assets/tokenizer"


def texts_of(dataset: str) -> list[str]:
    source = DATASETS[dataset](None, "text")
    return [source.get(i).text for i in range(len(source))]


def byte_level_bpe(texts: list[str], vocab_size: int, special_tokens: list[str]) -> Tokenizer:
    """Byte-level BPE over Llama 3's pattern; ids are the special tokens, the 256 bytes, then the merges in order."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def tiktoken_file(texts: list[str]) -> bytes:
    """Train a tiktoken file: ranks are the 256 bytes, then the merged tokens in the order of training."""
    # ByteLevel writes the printable bytes of Latin-1 as themselves and the others, in order, as U+0100 and on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(b): b for b in printable}
    byte_of |= {chr(0x100 + i): b for i, b in enumerate(b for b in range(256) if b not in printable)}
    vocabulary = byte_level_bpe(texts, VOCAB_SIZE - NUM_SPECIAL, []).get_vocab()
    tokens = [bytes(byte_of[c] for c in token) for token in sorted(vocabulary, key=vocabulary.__getitem__)]
    ranked = [*(bytes([b]) for b in range(256)), *(t for t in tokens if len(t) > 1)]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranked))


def sentencepiece_file(texts: list[str]) -> bytes:
    """Train with the options of Llama 2 (source: the trainer_spec inside its tokenizer.model)."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines() if line.strip()),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.9995,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def json_file(texts: list[str]) -> bytes:
    bpe = byte_level_bpe(texts, VOCAB_SIZE, ["<|begin_of_text|>", "<|end_of_text|>"])
    return json.dumps(json.loads(bpe.to_str()), separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread: the same result every time
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    texts, held_out = texts_of("python_stdlib"), texts_of("python_stdlib_validation")
    size = sum(len(t.encode()) for t in held_out)
    makers = {"tiktoken.model": tiktoken_file, "sentencepiece.model": sentencepiece_file, "tokenizer.json": json_file}
    for name, make in makers.items():
        (folder / name).write_bytes(make(texts))
        tokenizer = build_tokenizer(str(folder / name))
        tokens = sum(len(tokenizer.encode(t)) for t in held_out)
        print(f"{folder / name}: {tokenizer.vocab_size} ids, {size / tokens:.2f} bytes per token")


if __name__ == "__main__":
    main()
