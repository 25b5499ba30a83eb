"""Write the data of the examples from what Python has on every machine: the chapters of its language reference.

    python examples/make_data.py      into examples_data/: book.jsonl, questions.jsonl, pairs.jsonl and tokenizer/

The book has a chapter in each record. A question asks for a chapter by its subject and is answered by its first
sentence. A pair prefers that answer to the same one in capital letters. The tokenizer has the words of the book, and a
chat template.
"""

import json
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = Path("examples_data")
BEGIN, END, SPEAKER, DONE = "<|begin|>", "<|end|>", "<|speaker|>", "<|done|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|speaker|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|done|>' }}{% endgeneration %}{% else %}{{ m.content + '<|done|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|speaker|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Train a byte-level tokenizer of 1,024 tokens on the book, and save it as Hugging Face has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[BEGIN, END, SPEAKER, DONE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[subject] for subject in sorted(topics)), trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END}
    config |= {"additional_special_tokens": [SPEAKER, DONE], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def sentence(chapter: str) -> str:
    """Return the first sentence below the title of a chapter."""
    paragraph = next(part for part in chapter.split("\n\n")[1:] if part.strip())
    return " ".join(paragraph.split()).split(". ")[0][:200]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    subjects = sorted(topics)
    answers = {subject: sentence(topics[subject]) for subject in subjects}
    questions = {subject: f"What does Python's reference say of {subject}?" for subject in subjects}
    rows = {
        "book.jsonl": [{"text": topics[subject]} for subject in subjects],
        "questions.jsonl": [
            {"messages": [{"role": "user", "content": questions[s]}, {"role": "assistant", "content": answers[s]}]}
            for s in subjects
        ],
        "pairs.jsonl": [
            {"prompt": questions[s], "chosen": answers[s], "rejected": answers[s].upper()} for s in subjects
        ],
    }
    for name, records in rows.items():
        (FOLDER / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        print(f"{FOLDER / name}: {len(records)} records")
    write_tokenizer(FOLDER / "tokenizer")


if __name__ == "__main__":
    main()
