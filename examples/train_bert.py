#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train BERT to fill in masked tokens, with PatrickStar or in plain PyTorch.

The model is Hugging Face's, the optimizer and the loop are PyTorch's. One line makes it train
beyond memory: `patrickstar.init(...)`, before the model is built. `--plain` leaves that line out,
and gives the same numbers.

    python examples/train_bert.py --steps 50 --host-memory 64MiB
    python examples/train_bert.py --model my-bert-folder --save fine-tuned my-text.txt
"""

from __future__ import annotations

import argparse

import torch
from example_options import parse_options
from text_data import (
    MASK,
    TextBlocks,
    load_tokenizer,
    mask_tokens,
    read_texts,
    repeat,
    standard_library_files,
    train_tokenizer,
)
from tokenizers import Tokenizer
from training_report import TrainingReport
from transformers import BertConfig, BertForMaskedLM

# In the sample at the end, one token in so many is hidden.
SAMPLE_STRIDE = 8


def build_model(args: argparse.Namespace) -> BertForMaskedLM:
    """Returns the model of a local folder, or a new one of the size that was asked for."""
    if args.model:
        return BertForMaskedLM.from_pretrained(args.model)
    config = BertConfig(
        vocab_size=args.vocab,
        max_position_embeddings=args.positions,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.width,
    )
    return BertForMaskedLM(config)


def fill_in_sample(model: BertForMaskedLM, tokenizer: Tokenizer, tokens: torch.Tensor) -> str:
    """Hides some tokens of a text and returns it with what the model puts there, [in brackets]."""
    hidden = torch.arange(SAMPLE_STRIDE - 1, len(tokens), SAMPLE_STRIDE)
    inputs = tokens.index_fill(0, hidden, tokenizer.token_to_id(MASK))
    model.eval()
    with torch.no_grad():
        guesses = model(input_ids=inputs.unsqueeze(0)).logits[0].argmax(dim=-1)
    pieces = []
    start = 0
    for position in hidden.tolist():
        pieces.append(tokenizer.decode(tokens[start:position].tolist()))
        pieces.append(f"[{tokenizer.decode([int(guesses[position])])}]")
        start = position + 1
    num_right = int((guesses[hidden] == tokens[hidden]).sum())
    return f"{''.join(pieces)}\n({num_right} of {len(hidden)} hidden tokens guessed right)"


def main() -> None:
    args = parse_options(
        "Train BERT to fill in masked tokens, with PatrickStar or in plain PyTorch."
    )
    torch.manual_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)

    if args.plain:
        from torch.utils.data import DataLoader

        stats = None
    else:
        import patrickstar
        from patrickstar.data import DataLoader

        patrickstar.init(
            host_memory=args.host_memory, spill_dir=args.spill_dir
        )  # the one added line
        stats = patrickstar.stats

    texts = read_texts(args.text or standard_library_files())
    tokenizer = load_tokenizer(args.model) if args.model else train_tokenizer(texts, args.vocab)
    mask_id = tokenizer.token_to_id(MASK)
    report = TrainingReport(args.steps, stats)

    model = build_model(args)
    if args.checkpointing:
        model.activation_checkpointing_enable()
    dataset = TextBlocks(
        tokenizer, texts, args.tokens or min(128, model.config.max_position_embeddings)
    )
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    model.train()
    for tokens in report.follow(repeat(loader, args.steps)):
        inputs, labels = mask_tokens(tokens, mask_id, model.config.vocab_size)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
            loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        report.add(loss.item(), tokens.numel())

    report.sample = fill_in_sample(model, tokenizer, dataset[len(dataset) // 2])
    print(f"\n{report.sample}\n\n{report.summary()}")
    if args.record:
        report.write_record(args.record, model, optimizer)
    if args.save:
        if not args.plain:
            patrickstar.shutdown()  # from here on the weights are plain tensors in memory
        model.save_pretrained(args.save)
        tokenizer.save(str(args.save / "tokenizer.json"))
        print(f"saved to {args.save}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted", flush=True)
        raise SystemExit(130) from None
