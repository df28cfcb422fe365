# SPDX-License-Identifier: Apache-2.0
"""The small models of the twin runs, from 0.2 to 2 million parameters.

Each is a module whose forward returns a loss, with ``batch`` to draw its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling
import torch.utils.checkpoint
from torch import nn

Batch = tuple[torch.Tensor, ...]


class Workload(nn.Module):
    """A model with its loss and its data.

    Args:
        checkpointing: "off", "reentrant" or "non-reentrant".
    """

    vocabulary = 0
    batch_shape: tuple[int, ...] = ()

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.checkpointing = checkpointing

    def batch(self, generator: torch.Generator) -> Batch:
        return (torch.randint(self.vocabulary, self.batch_shape, generator=generator),)

    def run(self, block: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        """Runs a block, checkpointed if the case says so."""
        if self.checkpointing == "off":
            return block(*inputs)
        return torch.utils.checkpoint.checkpoint(
            block, *inputs, use_reentrant=self.checkpointing == "reentrant"
        )

    def next_token_loss(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class HuggingFace(Workload):
    """A model of transformers, with that library's own switch for checkpointing."""

    def __init__(self, checkpointing: str, model: Any) -> None:
        super().__init__(checkpointing)
        self.model = model
        if checkpointing != "off":
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"}
            )


class Gpt2(HuggingFace):
    vocabulary = 503
    batch_shape = (2, 24)

    def __init__(self, checkpointing: str) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=self.vocabulary, n_positions=32, n_embd=96, n_layer=4, n_head=4,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        super().__init__(checkpointing, GPT2LMHeadModel(config))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class Bert(HuggingFace):
    vocabulary = 307
    batch_shape = (3, 20)

    def __init__(self, checkpointing: str) -> None:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=self.vocabulary, hidden_size=80, num_hidden_layers=3,
            num_attention_heads=4, intermediate_size=240, max_position_embeddings=40,
        )  # fmt: skip
        super().__init__(checkpointing, BertForMaskedLM(config))

    def batch(self, generator: torch.Generator) -> Batch:
        (tokens,) = super().batch(generator)
        hidden = torch.rand(tokens.shape, generator=generator) < 0.3
        hidden[:, 0] = True  # at least one a row
        return tokens.masked_fill(hidden, 1), tokens.masked_fill(~hidden, -100)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(tokens)
        mask[0, -3:] = 0
        return self.model(input_ids=tokens, attention_mask=mask, labels=labels).loss


class Lstm(Workload):
    vocabulary = 211
    batch_shape = (4, 12)

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.embedding = nn.Embedding(self.vocabulary, 96)
        self.lstm = nn.LSTM(96, 112, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(112, self.vocabulary)

    def recur(self, hidden: torch.Tensor) -> torch.Tensor:
        # oneDNN has no LSTM in bf16 for processors without AVX-512; torch's own kernels do.
        with torch.backends.mkldnn.flags(enabled=not torch.is_autocast_enabled("cpu")):
            return self.lstm(hidden)[0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.run(self.recur, self.embedding(tokens))
        return self.next_token_loss(self.head(hidden), tokens)


class Conv(Workload):
    batch_shape = (4, 3, 14, 14)
    memory_format = torch.contiguous_format

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.stem = nn.Conv2d(3, 48, 3, padding=1)
        self.blocks = nn.ModuleList([self.block(48, 80), self.block(80, 96), self.block(96, 96)])
        self.head = nn.Linear(96, 10)
        self.to(memory_format=self.memory_format)

    @staticmethod
    def block(width: int, out: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 1, bias=False), nn.GroupNorm(4, out), nn.GELU(), nn.AvgPool2d(2),
        )  # fmt: skip

    def batch(self, generator: torch.Generator) -> Batch:
        images = torch.randn(self.batch_shape, generator=generator)
        labels = torch.randint(10, self.batch_shape[:1], generator=generator)
        return images.to(memory_format=self.memory_format), labels

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = self.run(block, hidden)
        return F.cross_entropy(self.head(hidden.mean((2, 3))), labels)


class ConvChannelsLast(Conv):
    memory_format = torch.channels_last


class EncoderDecoder(Workload):
    """nn.Transformer, with the fast paths and masks of torch."""

    vocabulary = 151
    batch_shape = (3, 14)

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.embedding = nn.Embedding(self.vocabulary, 64)
        self.transformer = nn.Transformer(64, 4, 2, 2, dim_feedforward=160, batch_first=True)
        self.head = nn.Linear(64, self.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.run(
            lambda source, target: self.transformer(source, target, tgt_mask=mask),
            hidden.flip(1),
            hidden,
        )
        return self.next_token_loss(self.head(hidden), tokens)


class Encoder(Workload):
    """nn.TransformerEncoder, norm first, each layer checkpointed by itself."""

    vocabulary = 181
    batch_shape = (2, 18)

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        layer = nn.TransformerEncoderLayer(
            128, 4, dim_feedforward=384, activation="gelu", batch_first=True, norm_first=True
        )
        self.embedding = nn.Embedding(self.vocabulary, 128)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(128, self.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.encoder.layers:
            hidden = self.run(layer, hidden)
        return self.next_token_loss(self.head(hidden), tokens)


class Tied(Workload):
    """A language model whose head is its embedding; also a temperature without dimensions."""

    vocabulary = 401
    batch_shape = (4, 10)

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.norm = nn.LayerNorm(120)  # registered before the tied pair
        self.embedding = nn.Embedding(self.vocabulary, 120)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(120, 200), nn.Tanh(), nn.Dropout(0.1), nn.Linear(200, 120))
            for _ in range(4)
        )
        self.head = nn.Linear(120, self.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + self.run(layer, hidden)
        return self.next_token_loss(self.head(self.norm(hidden)) / self.temperature, tokens)


class MixtureOfExperts(Workload):
    """Top-1 routing: which experts run, and so which have gradients, depends on the data.

    The last expert is out of reach of the router: its gradients stay None.
    """

    vocabulary = 131
    batch_shape = (3, 9)
    num_experts = 5

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.embedding = nn.Embedding(self.vocabulary, 72)
        self.router = nn.Linear(72, self.num_experts)
        with torch.no_grad():
            self.router.bias[-1] = -1e6
            self.router.bias[0] = 0.8  # so that some batches leave other experts out
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(72, 288), nn.GELU(), nn.Linear(288, 72))
            for _ in range(self.num_experts)
        )
        self.head = nn.Linear(72, self.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        flat = hidden.flatten(0, 1)
        share, choice = self.router(flat).softmax(-1).max(-1)
        mixed = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            chosen = (choice == index).nonzero().squeeze(1)
            if chosen.numel() > 0:
                answer = self.run(expert, flat[chosen]) * share[chosen, None]
                mixed = mixed.index_add(0, chosen, answer.to(mixed.dtype))
        return self.next_token_loss(self.head(flat + mixed).view(*tokens.shape, -1), tokens)


MODELS: Mapping[str, Callable[[str], Workload]] = {
    "gpt2": Gpt2,
    "bert": Bert,
    "lstm": Lstm,
    "conv": Conv,
    "conv-channels-last": ConvChannelsLast,
    "encoder-decoder": EncoderDecoder,
    "encoder": Encoder,
    "tied": Tied,
    "experts": MixtureOfExperts,
}
