# SPDX-License-Identifier: Apache-2.0
"""What users of peft write. Nothing here knows of patrickstar."""

from __future__ import annotations

from pathlib import Path

import tiny_models
import torch
import trainer_programs
from notes import Notes
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn


def gpt2_with_lora(dropout: float = 0.1) -> PeftModel:
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=dropout,
        target_modules=["c_attn", "c_fc"],
        fan_in_fan_out=True,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(tiny_models.gpt2(), config)


def train(notes: Notes, title: str, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    model.train()
    for step in range(4):
        tokens = torch.randint(tiny_models.VOCABULARY, (4, tiny_models.LENGTH))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        notes.note(f"{title} loss {step}", loss)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def logits(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(tiny_models.LENGTH).unsqueeze(0)).logits


def gpt2_learns_and_switches_its_adapter(notes: Notes, folder: Path) -> None:
    model = gpt2_with_lora()
    notes.end("train", model, train(notes, "train", model))
    notes.note("adapter", logits(model))
    with model.disable_adapter():
        notes.note("no adapter", logits(model))
    model.merge_adapter()
    notes.note("merged adapter", logits(model))
    model.unmerge_adapter()
    notes.note("unmerged adapter", model.state_dict())


def bert_in_trainer_with_its_head_trained_too(notes: Notes, folder: Path) -> None:
    config = LoraConfig(
        r=4,
        target_modules=["query", "value"],
        modules_to_save=["classifier"],
        task_type="SEQ_CLS",
    )
    trainer = trainer_programs.make_trainer(
        notes,
        "train",
        get_peft_model(tiny_models.bert(), config),
        tiny_models.sentences(16),
        folder,
        max_steps=4,
        max_grad_norm=0.1,
    )
    trainer.train()
    trainer_programs.note_end(notes, trainer)


def gpt2_saves_loads_and_merges(notes: Notes, folder: Path) -> None:
    model = gpt2_with_lora()
    notes.end("train", model, train(notes, "train", model))
    model.save_pretrained(str(folder / "adapter"))
    merged = model.merge_and_unload()
    notes.note("merged weight", merged.state_dict())
    notes.note("merged", logits(merged))
    merged.save_pretrained(str(folder / "merged"))
    del model, merged

    torch.manual_seed(1234)  # the base that the adapter was trained on
    loaded = PeftModel.from_pretrained(tiny_models.gpt2(), str(folder / "adapter"))
    notes.note("loaded weight", loaded.state_dict())
    notes.note("loaded", logits(loaded))


PROGRAMS = {
    "gpt2_learns_and_switches_its_adapter": (gpt2_learns_and_switches_its_adapter, "96KiB"),
    "bert_in_trainer_with_its_head_trained_too": (
        bert_in_trainer_with_its_head_trained_too,
        "64KiB",
    ),
    "gpt2_saves_loads_and_merges": (gpt2_saves_loads_and_merges, "96KiB"),
}
