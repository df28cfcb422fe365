# SPDX-License-Identifier: Apache-2.0
"""What users of accelerate write. Nothing here knows of patrickstar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_models
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from notes import Notes


class Training:
    """Model, optimizer, data and schedule as ``prepare`` gives them back."""

    def __init__(self, model: torch.nn.Module, rows: list[Any], **options: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # of the program before this one
        self.accelerator = Accelerator(cpu=True, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
        loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )

    def run_epoch(self, notes: Notes, title: str) -> None:
        for index, batch in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                    notes.note(f"{title} norm {index}", norm)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            notes.note(f"{title} loss {index}", self.accelerator.gather_for_metrics(loss))

    def note_end(self, notes: Notes, title: str) -> None:
        notes.end(title, self.accelerator.unwrap_model(self.model), self.optimizer.optimizer)


def bert_accumulates_and_clips(notes: Notes, folder: Path) -> None:
    training = Training(
        tiny_models.bert(), tiny_models.sentences(32), gradient_accumulation_steps=2
    )
    training.run_epoch(notes, "epoch")
    training.note_end(notes, "epoch")


def gpt2_in_bf16(notes: Notes, folder: Path) -> None:
    training = Training(tiny_models.gpt2(), tiny_models.texts(16), mixed_precision="bf16")
    training.run_epoch(notes, "epoch")
    training.note_end(notes, "epoch")


def gpt2_saves_and_loads_its_state(notes: Notes, folder: Path) -> None:
    training = Training(tiny_models.gpt2(), tiny_models.texts(16), gradient_accumulation_steps=2)
    training.run_epoch(notes, "first epoch")
    training.accelerator.save_state(str(folder / "state"))
    training.run_epoch(notes, "second epoch")
    training.note_end(notes, "second epoch")

    training.accelerator.load_state(str(folder / "state"))
    training.note_end(notes, "loaded")
    training.run_epoch(notes, "second epoch again")
    training.note_end(notes, "second epoch again")
    training.accelerator.save_model(training.model, str(folder / "model"))


PROGRAMS = {
    "bert_accumulates_and_clips": (bert_accumulates_and_clips, "192KiB"),
    "gpt2_in_bf16": (gpt2_in_bf16, "192KiB"),
    "gpt2_saves_and_loads_its_state": (gpt2_saves_and_loads_its_state, "192KiB"),
}
