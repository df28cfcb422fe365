# SPDX-License-Identifier: Apache-2.0
"""What users of transformers' Trainer write. Nothing here knows of patrickstar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_models
import torch
from notes import Notes
from transformers import Trainer, TrainingArguments


class NotingTrainer(Trainer):
    """Notes the exact loss of each micro-batch, which the log rounds."""

    notes: Notes
    title: str
    num_losses = 0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.num_losses += 1
        self.notes.note(f"{self.title} loss {self.num_losses}", loss)
        return loss


def make_trainer(
    notes: Notes, title: str, model: torch.nn.Module, data: list[Any], folder: Path, **options: Any
) -> NotingTrainer:
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        **{"logging_steps": 1, "save_strategy": "no", **options},
    )
    trainer = NotingTrainer(model, arguments, train_dataset=data, eval_dataset=data[:6])
    trainer.notes, trainer.title = notes, title
    return trainer


def note_end(notes: Notes, trainer: NotingTrainer) -> None:
    """Notes the weights, the optimizer's state and the log but for its times."""
    model, optimizer = trainer.model, trainer.optimizer.optimizer
    notes.end(trainer.title, model, optimizer)
    for index, record in enumerate(trainer.state.log_history):
        kept = {k: v for k, v in record.items() if "runtime" not in k and "per_second" not in k}
        notes.note(f"{trainer.title} log {index}", kept)


def bert_accumulates_clips_and_evaluates(notes: Notes, folder: Path) -> None:
    trainer = make_trainer(
        notes,
        "train",
        tiny_models.bert(),
        tiny_models.sentences(32),
        folder,
        max_steps=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.1,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    note_end(notes, trainer)
    notes.note("predictions", torch.from_numpy(trainer.predict(trainer.eval_dataset).predictions))


def gpt2_in_bf16_with_checkpointing(notes: Notes, folder: Path) -> None:
    trainer = make_trainer(
        notes,
        "train",
        tiny_models.gpt2(),
        tiny_models.texts(16),
        folder,
        max_steps=4,
        bf16=True,
        optim="adamw_torch",
        gradient_checkpointing=True,
        lr_scheduler_type="cosine",
        warmup_steps=2,
    )
    trainer.train()
    note_end(notes, trainer)


SAVING = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}


def gpt2_saves(notes: Notes, folder: Path) -> None:
    data = tiny_models.texts(24)
    trainer = make_trainer(notes, "train", tiny_models.gpt2(), data, folder, **SAVING)
    trainer.train()
    note_end(notes, trainer)


def gpt2_resumes(notes: Notes, folder: Path) -> None:
    """Goes on from the middle of ``gpt2_saves``."""
    data = tiny_models.texts(24)
    trainer = make_trainer(notes, "train", tiny_models.gpt2(), data, folder, **SAVING)
    trainer.train(resume_from_checkpoint=str(folder.parent / "gpt2_saves" / "checkpoint-4"))
    note_end(notes, trainer)
    trainer.save_model(folder / "final")
    loaded = type(trainer.model).from_pretrained(folder / "final")
    notes.note("loaded", loaded.state_dict())


PROGRAMS = {
    "bert_accumulates_clips_and_evaluates": (bert_accumulates_clips_and_evaluates, "192KiB"),
    "gpt2_in_bf16_with_checkpointing": (gpt2_in_bf16_with_checkpointing, "192KiB"),
    "gpt2_saves": (gpt2_saves, "192KiB"),
    "gpt2_resumes": (gpt2_resumes, "128KiB"),  # another budget than that of the first half
}
