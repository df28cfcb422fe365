#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train GPT-2 on text files, with PatrickStar or in plain PyTorch.

The model is Hugging Face's, the optimizer and the loop are PyTorch's. One line makes it train
beyond memory: `patrickstar.init(...)`, before the model is built. `--plain` leaves that line out,
and gives the same numbers.

    python examples/train_gpt2.py --steps 50 --host-memory 64MiB
    python examples/train_gpt2.py --model my-gpt2-folder --save fine-tuned my-text.txt
"""

from __future__ import annotations

import argparse

import torch
from example_options import parse_options
from text_data import (
    END_OF_TEXT,
    TextBlocks,
    load_tokenizer,
    read_texts,
    repeat,
    standard_library_files,
    train_tokenizer,
)
from tokenizers import Tokenizer
from training_report import TrainingReport
from transformers import GPT2Config, GPT2LMHeadModel

SAMPLE_TOKENS = 40


def build_model(args: argparse.Namespace, tokenizer: Tokenizer) -> GPT2LMHeadModel:
    """Returns the model of a local folder, or a new one of the size that was asked for."""
    if args.model:
        return GPT2LMHeadModel.from_pretrained(args.model)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    config = GPT2Config(
        vocab_size=args.vocab,
        n_positions=args.positions,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.heads,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
    )
    return GPT2LMHeadModel(config)


def write_sample(model: GPT2LMHeadModel, tokenizer: Tokenizer, prompt: torch.Tensor) -> str:
    """Returns the prompt as text, continued by the model."""
    model.eval()
    with torch.no_grad():
        tokens = model.generate(
            prompt.unsqueeze(0),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=min(SAMPLE_TOKENS, model.config.n_positions - len(prompt)),
            do_sample=True,
            top_k=20,
            pad_token_id=model.config.eos_token_id,
        )
    continuation = tokenizer.decode(tokens[0, len(prompt) :].tolist())
    return f"{tokenizer.decode(prompt.tolist())}[ continued by the model: ]{continuation}"


def main() -> None:
    args = parse_options("Train GPT-2 on text files, with PatrickStar or in plain PyTorch.")
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
    report = TrainingReport(args.steps, stats)

    model = build_model(args, tokenizer)
    model.loss_type = (
        "ForCausalLM"  # what transformers falls back to, said here to avoid its warning
    )
    if args.checkpointing:
        model.activation_checkpointing_enable()
    dataset = TextBlocks(tokenizer, texts, args.tokens or min(128, model.config.n_positions))
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    model.train()
    for tokens in report.follow(repeat(loader, args.steps)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        report.add(loss.item(), tokens.numel())

    prompt = dataset[len(dataset) // 2][: dataset.block_size // 4]
    report.sample = write_sample(model, tokenizer, prompt)
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
