"""The demo's model and its text: a small GPT over bytes, Python's own standard library sources."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

_VOCABULARY = 256  # bytes
_TEXT_BYTES = 1 << 20


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    block: int = 64
    dropout: float = 0.1


class Block(nn.Module):
    """Causal self-attention and a feed-forward part, each behind a layer norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)
        self.feed_norm = nn.LayerNorm(shape.width)
        self.feed = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )
        self.dropout = nn.Dropout(shape.dropout)
        mask = torch.ones(shape.block, shape.block, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)
        self.mask: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block; input and output are batch x time x width."""
        batch, time, width = x.shape
        split = self.attention(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / (width // self.heads) ** 0.5
        scores = scores.masked_fill(~self.mask[:time, :time], float("-inf"))
        mixed = self.dropout(scores.softmax(-1)) @ value
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, time, width)))
        out: torch.Tensor = x + self.dropout(self.feed(self.feed_norm(x)))
        return out


class GPT(nn.Module):
    """A decoder-only transformer; its head is tied to the token embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.block, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, _VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of the next bytes; the input is batch x time indices."""
        positions = torch.arange(x.shape[1])
        hidden = self.dropout(self.tokens(x) + self.positions(positions))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def corpus() -> tuple[torch.Tensor, int]:
    """Return the sources of the standard library's top-level modules in order, and their number.

    Raises:
        FileNotFoundError: this Python has no sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text, files = bytearray(), 0
    for file in sorted(folder.glob("*.py")):
        if len(text) >= _TEXT_BYTES:
            break
        text += file.read_bytes()
        files += 1
    if len(text) < 1 << 14:
        raise FileNotFoundError(f"{folder} holds no Python sources to train on")
    return torch.frombuffer(text, dtype=torch.uint8), files


def sample(text: torch.Tensor, batch: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random pieces and the bytes that follow them, drawn from torch's global generator."""
    begins = torch.randint(len(text) - block - 1, (batch,)).tolist()
    pieces = torch.stack([text[begin : begin + block + 1] for begin in begins]).long()
    return pieces[:, :-1], pieces[:, 1:]
