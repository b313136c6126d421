"""ResNet-18 and DenseNet-121: the published networks, for small images too, traceable and without side effects."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedauc.models import ModelConfig
from fedauc.models._layers import InputScaling
from fedauc.models.cnn import SmallCNN
from fedauc.models.densenet import DenseNet121
from fedauc.models.resnet import ResNet18

CONFIGS = [ResNet18(), ResNet18(norm="batch"), DenseNet121(), DenseNet121(norm="batch")]
IDS = ["resnet18-group", "resnet18-batch", "densenet121-group", "densenet121-batch"]


def random_images(count: int = 4, side: int = 32, channels: int = 3) -> Tensor:
    shape = (count, channels, side, side)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("config", "published", "features"),
    [
        # Published counts are for 1,000 outputs: https://docs.pytorch.org/vision/stable/models.html
        (ResNet18(), 11_689_512, 512),
        (ResNet18(norm="batch"), 11_689_512, 512),
        (DenseNet121(), 7_978_856, 1024),
        (DenseNet121(norm="batch"), 7_978_856, 1024),
    ],
    ids=IDS,
)
def test_weights_are_those_of_the_published_network(config: ModelConfig, published: int, features: int) -> None:
    module = config.build((3, 32, 32), 0)
    assert count_parameters(module) == published - (features + 1) * 999


@pytest.mark.parametrize("make", [ResNet18, DenseNet121])
def test_the_cifar_stem_is_a_small_convolution_without_pooling(make: type[ResNet18] | type[DenseNet121]) -> None:
    large, small = make().build((3, 32, 32), 0), make(stem="cifar").build((3, 32, 32), 0)
    assert count_parameters(large) - count_parameters(small) == 64 * 3 * (7 * 7 - 3 * 3)  # 64 kernels over 3 channels
    pools = [sum(isinstance(module, nn.MaxPool2d) for module in network.modules()) for network in (large, small)]
    assert pools == [1, 0]


def torchvisions_models() -> Any:
    """Skips the test where torchvision is not there, or was built for another torch, whose operators do not load."""
    try:
        return import_module("torchvision").models
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"needs the torchvision of this torch, pip install --no-deps: {error}")


@pytest.mark.parametrize("error", ["RuntimeError('no operator nms')", "OSError('undefined symbol')", "ImportError()"])
def test_a_torchvision_that_does_not_load_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    (tmp_path / "torchvision.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs the torchvision of this torch"):
        torchvisions_models()


@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
def test_scores_are_torchvisions(name: str) -> None:
    """Same parameters, same outputs, for odd and even sides that torchvision can take; training and evaluation."""
    reference = getattr(torchvisions_models(), name)(num_classes=1, weights=None).double()
    config = {"resnet18": ResNet18, "densenet121": DenseNet121}[name](norm="batch")
    network = config.build((3, 64, 64), 0).double()
    assert [p.shape for p in network.parameters()] == [p.shape for p in reference.parameters()]
    with torch.no_grad():
        for parameter, expected in zip(network.parameters(), reference.parameters(), strict=True):
            parameter.copy_(expected)
    inputs = torch.randn(3, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        assert torch.allclose(network(inputs), reference(inputs), rtol=1e-9)
    assert torch.allclose(network.eval()(inputs), reference.eval()(inputs), rtol=1e-9)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_small_and_grey_images_have_finite_scores(config: ModelConfig) -> None:
    """28 halves to 14, 7, then odd sides; torchvision's densenet121 has nothing left to pool there."""
    scores = config.build((1, 28, 28), 0)(random_images(side=28, channels=1))
    assert scores.shape == (4, 1)
    assert torch.isfinite(scores).all()
    assert scores.std() > 0


@pytest.mark.parametrize("config", [ResNet18(norm="batch"), DenseNet121()], ids=["resnet18-batch", "densenet121-group"])
def test_a_compiler_sees_one_graph_and_the_same_outputs(config: ModelConfig) -> None:
    """The first eight parts, which hold every kind of layer: tracing all 121 takes a minute."""
    module = config.build((3, 32, 32), 0)
    assert isinstance(module.body, nn.Sequential)
    start = InputScaling(module.body[:8], config.shift, config.scale)
    compiled = torch.compile(start, fullgraph=True, backend="eager")
    assert torch.equal(compiled(random_images()), start(random_images()))


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_inputs_are_left_alone(config: ModelConfig) -> None:
    inputs = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    initial = inputs.clone()
    config.build((3, 32, 32), 0)(inputs)
    assert torch.equal(inputs, initial)


@pytest.mark.parametrize("config", [ResNet18(), DenseNet121()], ids=["resnet18", "densenet121"])
def test_functional_gradients_are_autograds(config: ModelConfig) -> None:
    module = config.build((3, 32, 32), 0).double()
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def total_output(state: dict[str, Tensor]) -> Tensor:
        scores: Tensor = torch.func.functional_call(module, state, (random_images(2),))
        return scores.sum()

    gradients = torch.func.grad(total_output)(weights)
    module(random_images(2)).sum().backward()
    for name, parameter in module.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad if parameter.grad is not None else parameter, atol=1e-12)


@pytest.mark.parametrize(
    ("config", "shape", "fan"),
    [
        (ResNet18(), (128, 64, 3, 3), 128 * 9),  # by outputs
        (DenseNet121(), (32, 128, 3, 3), 128 * 9),  # by inputs
    ],
    ids=["resnet18", "densenet121"],
)
def test_kernels_start_as_published(config: ModelConfig, shape: tuple[int, ...], fan: int) -> None:
    """Variance 2 / fan, after He et al. 2015 (https://arxiv.org/abs/1502.01852)."""
    kernel = next(parameter for parameter in config.build((3, 32, 32), 0).parameters() if parameter.shape == shape)
    # The standard error of a deviation from 36,864 values or more is below 0.4 %; four of them.
    assert float(kernel.detach().std()) == pytest.approx((2 / fan) ** 0.5, rel=0.016)


def test_batch_norm_keeps_statistics_and_group_norm_none() -> None:
    module = ResNet18(norm="batch").build((3, 32, 32), 0)
    initial = [buffer.clone() for buffer in module.buffers()]
    module(random_images())
    # 20 norms: one in the stem, two in each of 8 blocks, three in shortcuts; each has a mean, a variance and a count.
    assert len(initial) == 3 * 20
    assert not any(torch.equal(old, new) for old, new in zip(initial, module.buffers(), strict=True))
    assert not list(ResNet18().build((3, 32, 32), 0).buffers())


def test_embeddings_have_as_many_numbers_as_asked() -> None:
    for config in (ResNet18(outputs=7), DenseNet121(outputs=7)):
        assert config.build((3, 32, 32), 0)(random_images(2)).shape == (2, 7)


def test_photographs_are_centred() -> None:
    """Bytes spread evenly over 0..255 have mean 1/2 and deviation 0.289 after division, so 0 and 1.16 here."""
    bytes_ = torch.arange(256, dtype=torch.uint8)[None]
    centred = InputScaling(_Echo(), ResNet18.shift, ResNet18.scale)(bytes_)
    assert abs(float(centred.mean())) < 1e-6
    assert float(centred.std()) == pytest.approx(1.16, abs=0.01)
    assert not InputScaling(_Echo(), ResNet18.shift, ResNet18.scale).divides_only
    assert str(InputScaling(_Echo(), 0.5, 0.25)) != str(InputScaling(_Echo()))
    plain = InputScaling(_Echo())
    assert plain.divides_only
    assert torch.equal(plain(bytes_), bytes_.float() / 255)


class _Echo(nn.Module):
    """Its inputs; the weight only gives it a type."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResNet18(stem="tiny"), "stem is 'tiny'; use 'imagenet' or 'cifar'"),  # type: ignore[arg-type]
        (lambda: DenseNet121(norm="layer"), "norm is 'layer'; use 'group' or 'batch'"),  # type: ignore[arg-type]
        (lambda: ResNet18(norm_groups=48), "norm_groups is 48; it must divide 64, the fewest channels of a layer"),
        (lambda: DenseNet121(norm_groups=64), "norm_groups is 64; it must divide 32"),
        (lambda: ResNet18(norm_groups=0), "norm_groups is 0; it must be a whole number of at least 1"),
        (lambda: DenseNet121(outputs=0), "outputs is 0; it must be a whole number of at least 1"),
        (lambda: ResNet18().build((29,), 0), "resnet18 needs images"),
        (lambda: SmallCNN().build((29,), 0), "small-cnn needs images"),
    ],
)
def test_parameters_are_bounded(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
