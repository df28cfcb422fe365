# SPDX-License-Identifier: Apache-2.0
"""From text files to batches of tokens: what the example scripts train on.

Nothing here knows PatrickStar; it is the ordinary preparation of any language model. Text comes
from files the user names, by default from the Python standard library's own sources. A small
byte-level BPE tokenizer is trained on that text in a second or two, so nothing is downloaded.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset

END_OF_TEXT = "<|endoftext|>"
MASK = "[MASK]"

# Enough for a few hundred steps of a small model, and tokenized in about two seconds.
DEFAULT_TEXT_BYTES = 1 << 20

# BERT's recipe: 15% of the tokens are predicted; of those, 80% are masked, 10% random, 10% stay.
PREDICTED_SHARE = 0.15
MASKED_SHARE = 0.8
RANDOM_SHARE = 0.1

# The label that PyTorch's cross-entropy ignores.
IGNORED_LABEL = -100


def standard_library_files(limit_bytes: int = DEFAULT_TEXT_BYTES) -> list[Path]:
    """Returns modules of the Python standard library, by name, until they hold `limit_bytes`."""
    folder = Path(sysconfig.get_path("stdlib"))
    chosen: list[Path] = []
    num_bytes = 0
    for path in sorted(folder.glob("[a-z]*.py")):
        if num_bytes >= limit_bytes:
            break
        chosen.append(path)
        num_bytes += path.stat().st_size
    if not chosen:
        raise SystemExit(f"no Python sources in {folder}; name text files on the command line")
    return chosen


def read_texts(paths: Iterable[Path]) -> list[str]:
    """Returns the content of the files; exits with a message that names one that cannot be read."""
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            raise SystemExit(f"cannot read text file {path}: {error.strerror}") from error
    return texts


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Returns a byte-level BPE tokenizer with at most `vocab_size` tokens, trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer that lies beside the weights in a model folder."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise SystemExit(
            f"no tokenizer.json in {folder}: expected a saved model with its tokenizer"
        )
    return Tokenizer.from_file(str(path))


class TextBlocks(Dataset[torch.Tensor]):
    """The text as consecutive blocks of `block_size` tokens, each an int64 tensor."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], block_size: int) -> None:
        self.block_size = block_size
        end_of_text = tokenizer.token_to_id(END_OF_TEXT)
        ids: list[int] = []
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            ids.extend(encoding.ids)
            if end_of_text is not None:
                ids.append(end_of_text)
        num_blocks = len(ids) // block_size
        if num_blocks == 0:
            raise SystemExit(
                f"text too short: {len(ids)} tokens, expected at least {block_size}; "
                "name more text files"
            )
        self._blocks = torch.tensor(ids[: num_blocks * block_size]).view(num_blocks, block_size)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._blocks[index]


def repeat(loader: Iterable[torch.Tensor], num_batches: int) -> Iterator[torch.Tensor]:
    """Yields `num_batches` batches, going through the loader again as often as needed."""
    produced = 0
    while True:
        for batch in loader:
            if produced == num_batches:
                return
            produced += 1
            yield batch


def mask_tokens(
    tokens: torch.Tensor, mask_id: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hides some tokens for masked-language training; returns (inputs, labels)."""
    predicted = torch.rand(tokens.shape) < PREDICTED_SHARE
    labels = torch.where(predicted, tokens, IGNORED_LABEL)
    fate = torch.rand(tokens.shape)
    random_tokens = torch.randint(vocab_size, tokens.shape)
    inputs = torch.where(predicted & (fate < MASKED_SHARE), mask_id, tokens)
    randomized = predicted & (fate >= MASKED_SHARE) & (fate < MASKED_SHARE + RANDOM_SHARE)
    return torch.where(randomized, random_tokens, inputs), labels
