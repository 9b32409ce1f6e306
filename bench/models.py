"""The models that definitions name: how each is made, its input, its tiny stand-in.

Weights are random and nothing is downloaded; what is copied does not depend on the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bench.errors import BenchError
from bench.nets import AlexNet, InceptionV3, ResNet18, Vgg16


class Tiny(nn.Module):
    """A stand-in for any model where only the machinery is tested: milliseconds per step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight  # tied, as in GPT-2

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next token."""
        logits = self.head(self.layers(self.embedding(tokens)))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Bag(nn.Module):
    """Layers that compute next to nothing: what counts is the number of tensors, or their bytes.

    With AdamW a parameter comes with three tensors of optimizer state; buffers make up the rest.
    """

    WIDTH = 4

    def __init__(self, tensors: int, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(tensors // 8))
        for layer in self.layers:
            layer.weight = nn.Parameter(torch.randn(width))
            layer.bias = nn.Parameter(torch.randn(width))
        for i in range(tensors % 8):
            self.register_buffer(f"rest_{i}", torch.randn(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss that reaches every parameter."""
        some = [p if len(p) == self.WIDTH else p[: self.WIDTH] for p in self.parameters()]
        everything = torch.cat(some)
        return (everything * tokens.float().mean()).square().mean()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise BenchError(
            f"models gpt2 and bert-large need transformers ({error}): pip install '.[bench]'"
        ) from error
    return transformers


class Gpt2(nn.Module):
    """GPT-2 as `transformers` builds it from its default config, that of the small one.

    `shape` holds the differences from that config.
    """

    THIN = {"n_embd": 36}  # width, instead of 768
    MEDIUM = {"n_embd": 1024, "n_layer": 24, "n_head": 16}

    def __init__(self, **shape: int) -> None:
        super().__init__()
        made = _transformers()
        self.inner = made.GPT2LMHeadModel(made.GPT2Config(**shape))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next token."""
        loss: torch.Tensor = self.inner(input_ids=tokens, labels=tokens).loss
        return loss


class BertLarge(nn.Module):
    """BERT-large, cased, with its pooler and two classes, as it is tuned for sentences."""

    VOCABULARY = 28996
    _SHAPE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}

    def __init__(self) -> None:
        super().__init__()
        made = _transformers()
        config = made.BertConfig(vocab_size=self.VOCABULARY, intermediate_size=4096, **self._SHAPE)
        self.inner = made.BertForSequenceClassification(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a guess; sentences of both classes alternate."""
        labels = torch.arange(len(tokens), device=tokens.device) % 2
        loss: torch.Tensor = self.inner(input_ids=tokens, labels=labels).loss
        return loss


@dataclass(frozen=True)
class Model:
    """A model as definitions name it.

    Attributes:
        make: builds the model; takes the number of state tensors, which only `bag` heeds.
        tiny: the model that stands for it with `--tiny`.
        vocabulary: number of different tokens in its input; 0: its input is pictures.
        pixels: height and width of a picture.
        needs: a package that it needs beside torch.
    """

    make: Callable[[int], nn.Module]
    tiny: str = "tiny"
    vocabulary: int = 0
    pixels: int = 224
    needs: str = ""


def built(name: str, tensors: int, width: int) -> nn.Module:
    """Build the model of a name; `tensors` and `width` are those of `bag`, or 0 for its own."""
    if name == "bag" and width:
        return Bag(tensors, width)
    return MODELS[name].make(tensors)


MODELS = {
    "tiny": Model(lambda tensors: Tiny(), vocabulary=64),
    "bag": Model(Bag, "bag", vocabulary=8),
    "gpt2": Model(lambda tensors: Gpt2(), vocabulary=50257, needs="transformers"),
    "gpt2-medium": Model(
        lambda tensors: Gpt2(**Gpt2.MEDIUM), vocabulary=50257, needs="transformers"
    ),
    "gpt2-thin": Model(lambda tensors: Gpt2(**Gpt2.THIN), vocabulary=50257, needs="transformers"),
    "bert-large": Model(
        lambda tensors: BertLarge(), vocabulary=BertLarge.VOCABULARY, needs="transformers"
    ),
    "resnet18": Model(lambda tensors: ResNet18(), "resnet18-thin"),
    "vgg16": Model(lambda tensors: Vgg16(), "vgg16-thin"),
    "inception-v3": Model(lambda tensors: InceptionV3(), "inception-v3-thin", pixels=299),
    "alexnet": Model(lambda tensors: AlexNet(), "alexnet-thin"),
    # The same layers with a sixteenth of the channels, on the smallest pictures they take.
    "resnet18-thin": Model(lambda tensors: ResNet18(16), "resnet18-thin", pixels=64),
    "vgg16-thin": Model(lambda tensors: Vgg16(16, last=1), "vgg16-thin", pixels=32),
    "inception-v3-thin": Model(lambda tensors: InceptionV3(16), "inception-v3-thin", pixels=107),
    "alexnet-thin": Model(lambda tensors: AlexNet(16, last=1), "alexnet-thin", pixels=63),
}
