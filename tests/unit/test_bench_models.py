"""The models are those of the seed table: their states are as large, and each of them trains."""

from __future__ import annotations

import importlib.util

import pytest

from bench import definition
from bench.models import MODELS
from bench.work import Training, Work, state_bytes, tensors

# LightCheck (ICCD'23), table I. Its megabytes are 2^20 bytes for the nets for pictures, with SGD
# and momentum, and 10^6 for the language models, with Adam: nothing else comes near all six.
_SEED = {
    "resnet18": ("sgd", 90, 2**20),
    "vgg16": ("sgd", 1056, 2**20),
    "inception-v3": ("sgd", 183, 2**20),
    "alexnet": ("sgd", 467, 2**20),
    "gpt2": ("adamw", 1508, 10**6),
    "bert-large": ("adamw", 4004, 10**6),
}
# Bytes exactly, so that a model does not change unseen.
_OURS = {
    "resnet18": 93_554_656,
    "vgg16": 1_106_860_352,
    "inception-v3": 190_815_024,
    "alexnet": 488_806_720,
    "gpt2": 1_493_278_288,
    "bert-large": 4_002_977_340,
}


@pytest.mark.parametrize("model", _SEED)
def test_states_are_as_large_as_the_seed_table_says(model: str) -> None:
    needed = MODELS[model].needs
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"SKIPPED: no {needed}, pip install '.[bench]'")
    optimizer, megabytes, unit = _SEED[model]
    found = state_bytes(Work(model, optimizer))
    assert found == _OURS[model]
    assert found / unit == pytest.approx(megabytes, rel=0.011)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("model", sorted({model.tiny for model in MODELS.values()}))
def test_a_state_s_size_is_known_before_there_is_one(model: str, optimizer: str) -> None:
    for width in (0, 1000):
        work = Work(model, optimizer, batch=2, sequence=8, tensors=16, width=width)
        training = Training(work)
        training.steps(1)
        assert sum(t.nbytes for t in tensors(training.state())) == state_bytes(work)


@pytest.mark.parametrize("name", definition.names())
def test_what_stands_for_a_model_has_its_layers(name: str) -> None:
    whole = definition.load(name)
    small = definition.tiny(whole)
    for contender in small.contenders:
        work = small.work_of(contender)
        assert MODELS[work.model].tiny == work.model
        assert state_bytes(work) < 5_000_000


def test_a_bag_has_the_tensors_and_the_bytes_that_are_asked_for() -> None:
    training = Training(Work("bag", "adamw", tensors=96, width=10_000))
    training.steps(1)
    found = tensors(training.state())
    assert len(found) == 96
    assert sum(t.nbytes for t in found) == pytest.approx(96 * 3 * 10_000, rel=0.001)
    assert all(p.grad is None and p.isfinite().all() for p in training.plain.parameters())


@pytest.mark.parametrize("name", ["scaling"])
def test_sizes_and_numbers_are_those_of_the_labels(name: str) -> None:
    found = definition.load(name)
    for contender in found.contenders:
        work = found.work_of(contender)
        size, unit = contender.label.split()[:2]
        bytes_ = float(size) * {"MB": 1e6, "GB": 1e9}[unit]
        if "tensors" in contender.label:
            assert work.tensors == int(contender.label.split()[3].replace(",", ""))
        assert state_bytes(work) == pytest.approx(bytes_, rel=0.01)
