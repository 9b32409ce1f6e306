"""Nets for pictures after their papers, with random weights; each forward returns a mean loss.

They are written here and not taken from a package: pytorchcv needs torchvision, whose build for
CPUs is not on the registry, and one for CUDA beside a CPU build of torch breaks transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

CLASSES = 1000  # ImageNet's
_Size = int | tuple[int, int]


class Picturing(nn.Module):
    """A net of features and a classifier; its input has one picture of each class in turn."""

    features: nn.Module
    classifier: nn.Module

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a guess."""
        guess = self.classifier(self.features(pictures))
        labels = torch.arange(len(guess), device=guess.device) % guess.shape[1]
        return functional.cross_entropy(guess, labels)


def _heavy(inputs: int, hidden: int) -> nn.Sequential:
    """Build the classifier of AlexNet and VGG: nine tenths of all their weights."""
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Dropout()),
        *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout()),
        nn.Linear(hidden, CLASSES),
    )


class AlexNet(Picturing):
    """AlexNet of one column (Krizhevsky, 2014, arXiv 1404.5997), as torchvision and others have it.

    `thin` divides all widths; `last` is the height and width that is left of a picture.
    """

    def __init__(self, thin: int = 1, last: int = 6) -> None:
        super().__init__()
        a, b, c, d = (width // thin for width in (64, 192, 384, 256))
        self.features = nn.Sequential(
            *(nn.Conv2d(3, a, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(a, b, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(b, c, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(c, d, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(d, d, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        )
        self.classifier = _heavy(d * last * last, 4096 // thin)


class Vgg16(Picturing):
    """VGG-16 as its paper has it (Simonyan and Zisserman, 2015, table 1, D): no BatchNorm."""

    _CHANNELS = ((3, 64, 64), (64, 128, 128), (128, 256, 256, 256), (256, *[512] * 3), [512] * 4)

    def __init__(self, thin: int = 1, last: int = 7) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for block in self._CHANNELS:
            widths = [max(3, width // thin) for width in block]
            for inputs, outputs in pairwise(widths):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = _heavy(512 // thin * last * last, 4096 // thin)


def _convolution(
    inputs: int, outputs: int, size: _Size, stride: int = 1, padding: _Size = 0
) -> list[nn.Module]:
    """Build a convolution with BatchNorm instead of a bias."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


class _Residual(nn.Module):
    """Two convolutions beside a shortcut (He et al., figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *(*_convolution(inputs, outputs, 3, stride, 1), nn.ReLU(inplace=True)),
            *_convolution(outputs, outputs, 3, padding=1),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Sequential(*([] if same else _convolution(inputs, outputs, 1, stride)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both branches."""
        return functional.relu(self.inner(x) + self.shortcut(x))


class ResNet18(Picturing):
    """ResNet-18 (He et al., 2016, table 1), with projections where the width changes."""

    def __init__(self, thin: int = 1) -> None:
        super().__init__()
        widths = [64 // thin, *(width // thin for width in (64, 128, 256, 512))]
        blocks: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(pairwise(widths)):
            blocks += [_Residual(inputs, outputs, 2 if i else 1), _Residual(outputs, outputs, 1)]
        stem = [*_convolution(3, widths[0], 7, 2, 3), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES)
        )


class _Beside(nn.Module):
    """Branches beside each other, joined by channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all branches, joined."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class InceptionV3(Picturing):
    """Inception-V3 (Szegedy et al., 2016, table 1), without the auxiliary classifier.

    The modules' widths are those of the published code, which the paper does not list.
    """

    def __init__(self, thin: int = 1) -> None:
        super().__init__()
        self._thin = thin
        stem = self._chain(3, (32, 3, 2, 0), (32, 3, 1, 0), (64, 3, 1, 1))
        middle = self._chain(64, (80, 1, 1, 0), (192, 3, 1, 0))
        mixed = [self._mixed_a(192, 32), self._mixed_a(256, 64), self._mixed_a(288, 64)]
        mixed.append(
            _Beside(
                self._chain(288, (384, 3, 2, 0)),
                self._chain(288, (64, 1, 1, 0), (96, 3, 1, 1), (96, 3, 2, 0)),
                nn.MaxPool2d(3, 2),
            )
        )
        mixed += [self._mixed_b(inner) for inner in (128, 160, 160, 192)]
        mixed.append(
            _Beside(
                self._chain(768, (192, 1, 1, 0), (320, 3, 2, 0)),
                self._chain(768, (192, 1, 1, 0), *self._crossed(192), (192, 3, 2, 0)),
                nn.MaxPool2d(3, 2),
            )
        )
        mixed += [self._mixed_c(1280), self._mixed_c(2048)]
        pools = nn.MaxPool2d(3, 2), nn.MaxPool2d(3, 2)
        self.features = nn.Sequential(stem, pools[0], middle, pools[1], *mixed)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(),
            nn.Linear(2048 // thin, CLASSES),
        )

    @staticmethod
    def _crossed(width: int) -> Sequence[tuple[int, _Size, int, _Size]]:
        """Return a 7 x 7 convolution as a row and a column."""
        return (width, (1, 7), 1, (0, 3)), (width, (7, 1), 1, (3, 0))

    def _chain(self, inputs: int, *each: tuple[int, _Size, int, _Size]) -> nn.Sequential:
        """Build convolutions in sequence, given width, size, stride and padding of each."""
        layers: list[nn.Module] = []
        before = max(3, inputs // self._thin)
        for width, size, stride, padding in each:
            width //= self._thin
            layers += [*_convolution(before, width, size, stride, padding), nn.ReLU(inplace=True)]
            before = width
        return nn.Sequential(*layers)

    def _pooled(self, inputs: int, width: int) -> nn.Sequential:
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), self._chain(inputs, (width, 1, 1, 0)))

    def _mixed_a(self, inputs: int, pooled: int) -> nn.Module:
        return _Beside(
            self._chain(inputs, (64, 1, 1, 0)),
            self._chain(inputs, (48, 1, 1, 0), (64, 5, 1, 2)),
            self._chain(inputs, (64, 1, 1, 0), (96, 3, 1, 1), (96, 3, 1, 1)),
            self._pooled(inputs, pooled),
        )

    def _mixed_b(self, inner: int) -> nn.Module:
        row, column = self._crossed(inner)
        last_row, last_column = self._crossed(192)
        return _Beside(
            self._chain(768, (192, 1, 1, 0)),
            self._chain(768, (inner, 1, 1, 0), row, last_column),
            self._chain(768, (inner, 1, 1, 0), column, row, column, last_row),
            self._pooled(768, 192),
        )

    def _mixed_c(self, inputs: int) -> nn.Module:
        def split() -> nn.Module:
            return _Beside(
                self._chain(384, (384, (1, 3), 1, (0, 1))),
                self._chain(384, (384, (3, 1), 1, (1, 0))),
            )

        return _Beside(
            self._chain(inputs, (320, 1, 1, 0)),
            nn.Sequential(self._chain(inputs, (384, 1, 1, 0)), split()),
            nn.Sequential(self._chain(inputs, (448, 1, 1, 0), (384, 3, 1, 1)), split()),
            self._pooled(inputs, 192),
        )
